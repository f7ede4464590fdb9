"""`headway data prepare --on`: Slurm and Ray, for which functions of this process stand, share the units of input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.api.clusters import ray_tasks, slurm_array
from headway.api.clusters.ray_tasks import RayPool
from headway.api.clusters.slurm_array import SlurmPool
from headway.config import Config, load_config
from headway.core.errors import ConfigError, DataError
from headway.text.preparing.clusters import find_pool
from headway.text.preparing.prepare import prepare
from headway.text.preparing.report import PrepareReport
from support.runs import store_contents

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "rain", "falls", "on", "hills"]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    """A config of six files, each a unit, some of whose documents are equal."""
    monkeypatch.chdir(tmp_path)
    for number in range(6):
        texts = [f"{number % 4} {n} {' '.join(WORDS[n % 5 :])}" for n in range(20)]
        (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def make(store: str, *overrides: str) -> Config:
        dedup = "data.dedup={documents: true, max_removed: 0.9, max_removed_per_source: 1.0}"
        own = [f"data.store={store}", "data.sources=['*.jsonl']", "data.tokenizer.vocab_size=300"]
        own.append("data.bad_documents=fail")
        return load_config("quickstart", [*own, "data.shard_bytes=1000", dedup, *overrides], trains=False)

    return make


def prepared(config: Config, pool: Any = None) -> PrepareReport:
    return prepare(config.data, workers=1, pool=pool)


def stores_are_equal(*stores: str) -> bool:
    first, *others = (store_contents(Path(store)) for store in stores)
    return all(first == other for other in others)


class Slurm:
    """Runs an array when it is submitted, one element after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.scripts: list[str] = []
        self.calls: list[list[str]] = []
        self.done: Counter[str] = Counter()
        self.lost: dict[tuple[int, int], int] = {}
        """By the numbers of an array and of an element, the units after which the element is killed."""
        self.is_shared, self.alive = True, set[str]()
        monkeypatch.setattr(slurm_array, "open_streams", lambda: None)
        monkeypatch.setattr(slurm_array, "ask_program", self._ask)
        monkeypatch.setattr("headway.clouds.launchers.slurm.ask_program", self._ask)
        monkeypatch.setattr(slurm_array, "try_program", self._try)
        monkeypatch.setattr(slurm_array, "_LOOK_SECONDS", 0.0)
        monkeypatch.setattr(slurm_array, "VISIBILITY_TIMEOUT", 0.0)
        move = slurm_array._move

        def counted(results: Path, folder: Path) -> None:
            if self._left == 0:
                raise KeyboardInterrupt
            self._left -= 1
            self.done[slurm_array.result_files(results)[-1]] += 1
            move(results, folder)

        monkeypatch.setattr(slurm_array, "_move", counted)
        self._left = -1

    def _ask(self, words: list[str]) -> str:
        self.calls.append(words)
        if words[0] != "sbatch" or "--parsable" not in words:
            return "slurm 22.05"
        script, number = Path(words[-1]), len(self.scripts) + 1
        self.scripts.append(script.read_text())
        for element in range(int(re.findall(r"--array=0-(\d+)", self.scripts[-1])[0]) + 1):
            if self.is_shared:
                (script.parent / f"{element}.started").touch()
                self._monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(element))
                self._left = self.lost.get((number, element), -1)
                try:
                    slurm_array.main([str(script.parent), "1"])
                except KeyboardInterrupt:
                    (script.parent / f"{element}.log").write_text("first\nslurmstepd: error: Detected 1 oom_kill event")
        return f"{number};cluster\n"

    def _try(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        self.calls.append(words)
        if words[0] == "scancel":
            self.alive.discard(words[-1])
        number = words[words.index("--jobs") + 1] if "--jobs" in words else ""
        return subprocess.CompletedProcess(words, 0, "RUNNING\n" * (number in self.alive), "")


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    return Slurm(monkeypatch)


def test_elements_of_an_array_leave_the_bytes_of_one_machine(config: Callable[..., Config], slurm: Slurm) -> None:
    prepared(config("one"))
    setup = "launch.slurm={partition: cpu, time: '1:00:00', setup: [module load x], patch: {mem: 8G, signal: null}}"
    loaded = config("many", setup, "launch.gpus_per_machine=8")
    shown = SlurmPool(loaded, tasks=4, workers=2).describe(6)
    prepared(loaded, SlurmPool(loaded, tasks=4, workers=2))
    assert stores_are_equal("one", "many")
    assert len(slurm.scripts) == 2 and set(slurm.done.values()) == {1} and len(slurm.done) == 12
    options = re.findall(r"^#SBATCH --(\S+)$", slurm.scripts[0], re.MULTILINE)
    assert {"partition=cpu", "time=1:00:00", "mem=8G", "array=0-3", "nodes=1", "cpus-per-task=2"} <= {*options}
    assert not [option for option in options if option.startswith(("gres", "signal"))]
    assert "module load x" in slurm.scripts[0]
    assert slurm.scripts[0] in shown and "6 units in an array of 4 elements" in shown


def test_what_killed_elements_leave_goes_to_another_array(config: Callable[..., Config], slurm: Slurm) -> None:
    prepared(config("one"))
    slurm.lost = {(1, 0): 1, (1, 1): 0}
    prepared(config("many"), SlurmPool(config("many"), tasks=2, workers=1))
    assert stores_are_equal("one", "many")
    # Of six units the first array finishes one, the second the others; the third encodes.
    assert len(slurm.scripts) == 3 and set(slurm.done.values()) == {1}


def test_units_that_no_array_finishes_are_an_error_with_the_last_words(
    config: Callable[..., Config], slurm: Slurm
) -> None:
    slurm.lost = {(array, element): 0 for array in range(1, 9) for element in range(6)}
    with pytest.raises(
        DataError, match=r"3 arrays in a row .* 6 units: slurmstepd: error: Detected 1 oom_kill"
    ) as caught:
        prepared(config("many"), SlurmPool(config("many"), tasks=None, workers=1))
    assert len(slurm.scripts) == 3 and "mem" in str(caught.value.fix)
    # One unit that kills every element does not keep the others from being finished.
    slurm.scripts.clear()
    slurm.lost = {(array, 0): 0 for array in range(1, 9)}
    with pytest.raises(DataError, match="one of 1 unit"):
        prepared(config("many"), SlurmPool(config("many"), tasks=2, workers=1))
    assert len(slurm.done) == 5


def test_a_folder_that_the_machines_do_not_share_is_named(config: Callable[..., Config], slurm: Slurm) -> None:
    slurm.is_shared = False
    with pytest.raises(ConfigError, match="none of its machines has found the folder") as caught:
        prepared(config("many"), SlurmPool(config("many"), tasks=None, workers=1))
    assert ".many.preparing" in str(caught.value.where) and "shared" in str(caught.value.fix).replace("share", "shared")


def test_an_error_of_an_element_is_that_of_one_machine(config: Callable[..., Config], slurm: Slurm) -> None:
    with Path("3.jsonl").open("a") as file:
        file.write("{broken\n")
    with pytest.raises(DataError) as wanted:
        prepared(config("one"))
    with pytest.raises(DataError) as caught:
        prepared(config("many"), SlurmPool(config("many"), tasks=2, workers=1))
    assert caught.value.render() == wanted.value.render()


@pytest.mark.parametrize("dedup", ["{}", "{documents: true, max_removed: 0.9, max_removed_per_source: 1.0}"])
def test_equal_files_of_two_sources_have_a_shard_each(
    dedup: str, config: Callable[..., Config], slurm: Slurm, tmp_path: Path
) -> None:
    for source in ("left", "right"):
        (tmp_path / source).mkdir()
        (tmp_path / source / "0.jsonl").write_bytes((tmp_path / "0.jsonl").read_bytes())
    given = ("data.sources=[left, right]", f"data.dedup={dedup}")
    prepared(config("one", *given))
    prepared(config("many", *given), SlurmPool(config("many", *given), tasks=1, workers=1))
    assert stores_are_equal("one", "many")


def test_what_a_killed_preparation_recorded_for_another_limit_is_processed_again(
    config: Callable[..., Config], slurm: Slurm
) -> None:
    limits = [f"data.max_document_bytes={limit}" for limit in (70, 80)]
    slurm.lost = {(array, element): 1 for array in range(1, 9) for element in range(2)}
    given = ("data.bad_documents=skip",)
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        patch.setattr(slurm_array._ArrayLine, "_follow", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        prepared(config("many", *given, limits[0]), SlurmPool(config("many"), tasks=2, workers=1))
    slurm.lost = {}
    one = prepared(config("one", *given, limits[1]))
    many = prepared(config("many", *given, limits[1]), SlurmPool(config("many"), tasks=2, workers=1))
    assert (many.documents, many.too_large, many.text_bytes) == (one.documents, one.too_large, one.text_bytes)


def test_the_array_of_a_killed_preparation_is_ended_before_the_next(
    config: Callable[..., Config], slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(slurm_array, "_end_last", lambda folder: None)
        patch.setattr(slurm_array._ArrayLine, "_follow", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepared(config("many"), SlurmPool(config("many"), tasks=None, workers=1))
    slurm.alive.add("1")
    prepared(config("many"), SlurmPool(config("many"), tasks=None, workers=1))
    assert ["scancel", "--quiet", "1"] in slurm.calls and not slurm.alive
    assert set(slurm.done.values()) == {1} and len(slurm.scripts) == 2


class Ray:
    """Runs a task when its result is wanted, the last one first; some are lost."""

    def __init__(self) -> None:
        self.most_waiting = self.runs = 0
        self.cancelled: list[Any] = []
        self.options: dict[str, Any] = {}
        self.lost = 0
        self._waiting = 0
        self.exceptions = SimpleNamespace(RayError=RuntimeError)

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 2.0}}, {"Alive": False, "Resources": {"CPU": 64.0}}]

    def put(self, value: Any) -> Any:
        return value

    def remote(self, **options: Any) -> Callable[..., Any]:
        self.options = options

        def wrap(function: Callable[..., Any]) -> Any:
            def submit(*arguments: Any) -> Callable[[], Any]:
                self._waiting += 1
                self.most_waiting = max(self.most_waiting, self._waiting)
                return lambda: function(*arguments)

            return SimpleNamespace(remote=submit)

        return wrap

    def wait(self, tasks: list[Any], timeout: float | None) -> tuple[list[Any], list[Any]]:
        return ([], tasks) if timeout == 0 else (tasks[-1:], tasks[:-1])

    def get(self, task: Callable[[], Any]) -> Any:
        self._waiting -= 1
        if self.lost:
            raise RuntimeError("Task was killed due to the node running low on memory.\n\nMemory 99 %")
        self.runs += 1
        return task()

    def cancel(self, task: Any, force: bool) -> None:
        self.cancelled.append(task)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    stand_in = Ray()
    monkeypatch.setitem(sys.modules, "ray", stand_in)  # type: ignore[arg-type]
    return stand_in


def test_tasks_of_ray_leave_the_bytes_of_one_machine(
    config: Callable[..., Config], ray: Ray, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared(config("one"))
    prepared(config("many"), RayPool(config("many"), tasks=3, workers=1))
    assert stores_are_equal("one", "many")
    assert (ray.runs, ray.most_waiting, ray.options["num_cpus"]) == (12, 3, 1) and not ray.cancelled
    ray.most_waiting = 0
    prepared(config("wide"), RayPool(config("wide"), tasks=None, workers=3))
    assert "no machine of Ray has 3 processors" in capsys.readouterr().err
    ray.most_waiting = 0
    prepared(config("more"), RayPool(config("more"), tasks=None, workers=1))
    assert ray.most_waiting == 4  # for each of two processors a task that runs, and the next one


def test_errors_of_tasks_are_those_of_one_machine_and_lost_ones_are_explained(
    config: Callable[..., Config], ray: Ray
) -> None:
    with Path("3.jsonl").open("a") as file:
        file.write("{broken\n")
    with pytest.raises(DataError) as wanted:
        prepared(config("one"))
    with pytest.raises(DataError) as caught:
        prepared(config("many"), RayPool(config("many"), tasks=9, workers=1))
    assert caught.value.render() == wanted.value.render() and ray.cancelled
    ray.lost = 1
    with pytest.raises(DataError, match=r"lost 6 times, or could not start: Memory 99 %") as lost:
        prepared(config("many", "data.bad_documents=skip"), RayPool(config("many"), tasks=1, workers=1))
    assert "smaller units" in str(lost.value.fix)


def test_clusters_that_are_not_there_are_named_before_any_work(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = config("many")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="needs the package 'ray'") as caught:
        prepared(loaded, find_pool("ray")(loaded, tasks=None, workers=1))
    assert "pip install 'ray[" in str(caught.value.fix)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="no program 'sbatch'"):
        prepared(loaded, find_pool("slurm")(loaded, tasks=None, workers=1))
    with pytest.raises(ConfigError, match="cannot be prepared on 'moon'"):
        find_pool("moon")
    assert not list(Path().glob(".many*"))


def test_the_address_of_a_dashboard_is_no_cluster(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = Ray()
    monkeypatch.setattr(stand_in, "is_initialized", lambda: False)
    monkeypatch.setitem(sys.modules, "ray", stand_in)  # type: ignore[arg-type]
    pool = RayPool(config("many", "launch.ray.address=http://head:8265"), tasks=None, workers=1)
    with pytest.raises(ConfigError, match="address of its dashboard") as caught:
        pool.check()
    assert "ray job submit --address http://head:8265" in str(caught.value.fix)
    assert (
        ray_tasks.RayPool(config("many"), tasks=7, workers=2)
        .describe(9)
        .startswith("9 units: as many tasks of 2 processors, 7 at a time")
    )
