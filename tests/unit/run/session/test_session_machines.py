"""What depends on how many of the workers are on this machine."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headway.config import Config, LaneGrid
from headway.config.sections.data import DataConfig
from headway.core.coordination import launched
from headway.core.errors import ConfigError
from headway.parallel.world import World
from headway.run.session import grid
from headway.run.session.completed import completed


class Others(World):
    """A world whose other machine has fewer cores."""

    def gather(self, values: list[float]) -> list[list[float]]:
        return [values, values, [5.0], [5.0]]


@pytest.fixture(autouse=True)
def no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", launched.THREADS_VARIABLE, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({}, 8),
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "4,2"}, 4),
        ({"OMP_NUM_THREADS": "99"}, 8),
        ({"OMP_NUM_THREADS": "many"}, 8),
        ({"OMP_NUM_THREADS": "0"}, 8),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, 8),  # torchrun sets it where nothing is set
        ({"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "none"}, 2),
        ({"OMP_NUM_THREADS": "1", launched.THREADS_VARIABLE: ""}, 8),  # as a worker sees it that Headway has started
        ({"OMP_NUM_THREADS": "5", launched.THREADS_VARIABLE: "5"}, 5),
    ],
)
def test_omp_num_threads_is_an_upper_limit(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], threads: int
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(grid, "usable_cores", lambda: 8)
    world = World(0, 1, 0, torch.device("cpu"))
    assert grid.common_threads(Config(), world, LaneGrid(1, 1, 1)) == threads


@pytest.mark.parametrize(("on_this_machine", "cores", "threads"), [("2", 8, 4), ("2", 32, 5), (None, 8, 2)])
def test_threads_are_the_same_on_all_machines_and_use_each(
    monkeypatch: pytest.MonkeyPatch, on_this_machine: str | None, cores: int, threads: int
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if on_this_machine:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", on_this_machine)
    monkeypatch.setattr(grid, "usable_cores", lambda: cores)
    world = Others(0, 4, 0, torch.device("cpu"))
    assert grid.common_threads(Config(), world, LaneGrid(4, 1, 1)) == threads


@pytest.mark.parametrize("text", ["many", "0", "", "-1"])
def test_a_number_of_workers_that_is_none_is_told(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    with pytest.raises(ConfigError, match=f"'{text}' is no number of workers"):
        grid.common_threads(Config(), Others(0, 4, 0, torch.device("cpu")), LaneGrid(4, 1, 1))


@pytest.mark.parametrize(("world_size", "processes"), [("16", None), (None, 16)])
def test_under_an_agent_a_machine_has_the_workers_that_are_on_it(
    monkeypatch: pytest.MonkeyPatch, world_size: str | None, processes: int | None
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    if world_size:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", world_size)
    asked: list[Any] = []

    def open_store(data: DataConfig, *, check: bool = True, processes: int | None = None) -> Any:
        asked.append(processes)
        raise KeyError

    monkeypatch.setattr("headway.run.session.completed.open_store", open_store)
    config = Config(data=DataConfig(store=Path("nowhere")))
    with pytest.raises(KeyError):
        completed(config.model_copy(update={"parallel": config.parallel.model_copy(update={"workers": 16})}))
    assert asked == [processes]
