"""Processes that read samples: the same batches for any number of them, and none is lost with a process."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from headway.config import Batches
from headway.core.errors import DataError
from headway.data.feeding.dataset_feed import DatasetEvaluationFeed, DatasetFeed, Reader
from headway.data.feeding.plan import PlainPlan

ROWS = 24


class Drawn:
    """Samples with chance in them: from their own generator, and from those that processes seed."""

    def __init__(self, act: Callable[[int], object] = lambda row: None, *, globally: bool = False) -> None:
        self.act, self.globally = act, globally

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int, rng: np.random.Generator) -> dict[str, Any]:
        self.act(row)
        drawn = [float(rng.normal())]
        if self.globally:
            drawn += [random.random(), float(np.random.normal()), float(torch.rand(()))]
        return {"row": torch.tensor(row), "drawn": torch.tensor(drawn), "name": str(row)}


def feed(dataset: Any, processes: int, patience: float = 60.0) -> DatasetFeed:
    plan = PlainPlan(["dataset"], [ROWS], 7, Batches(((0, 8),), 1), 1)
    return DatasetFeed(
        Reader(dataset, seed=7), plan, lanes=2, micro_batch=3, processes=processes, patience_seconds=patience
    )


def read(dataset: Any, processes: int, patience: float = 60.0) -> list[tuple[int, int, Any]]:
    found, opened = [], feed(dataset, processes, patience)
    ahead = opened.ahead(range(2, 7), [0, 1])
    for step, lanes in enumerate(ahead or ({n: opened.batch(step, n) for n in (0, 1)} for step in range(2, 7)), 2):
        found += [(step, lane, part) for lane, parts in lanes.items() for part in parts]
    return found


def equal(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        a[:2] == b[:2] and a[2]["name"] == b[2]["name"] and torch.equal(a[2]["drawn"], b[2]["drawn"])
        for a, b in zip(one, other, strict=True)
    )


def test_batches_do_not_depend_on_processes() -> None:
    alone = read(Drawn(), 0)
    assert [len(part["name"]) for *_, part in alone[:4]] == [3, 1, 3, 1]
    assert equal(alone, read(Drawn(), 1)) and equal(alone, read(Drawn(), 3))


def test_an_item_is_drawn_anew_in_every_epoch() -> None:
    drawn: dict[str, set[float]] = {}
    for *_, part in read(Drawn(), 0):  # 40 rows of 24
        for name, value in zip(part["name"], part["drawn"].flatten().tolist(), strict=True):
            drawn.setdefault(name, set()).add(value)
    assert any(len(values) == 2 for values in drawn.values())
    assert sum(map(len, drawn.values())) == 40


def test_generators_are_seeded_in_processes() -> None:
    one, three = read(Drawn(globally=True), 1), read(Drawn(globally=True), 3)
    assert equal(one, three)
    values = torch.cat([part["drawn"].flatten() for *_, part in one])
    assert len(values.unique()) == len(values)


def test_a_dead_process_is_replaced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    once = tmp_path / "once"

    def die(row: int) -> None:
        if row == 17 and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    assert equal(read(Drawn(), 0), read(Drawn(die), 2))
    said = capfd.readouterr().err
    assert "died (signal 9) over item 17 of the dataset; it is replaced" in said


def test_a_hung_process_is_replaced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    once = tmp_path / "once"

    def hang(row: int) -> None:
        if row == 5 and not once.exists():
            once.touch()
            time.sleep(600)

    assert equal(read(Drawn(), 0), read(Drawn(hang), 2, patience=0.5))
    assert "over item 5 of the dataset; it is replaced" in capfd.readouterr().err


def test_an_item_that_ends_every_process_is_named() -> None:
    def die(row: int) -> None:
        if row == 9:
            os._exit(3)

    with pytest.raises(DataError, match=r"died \(exit code 3\) over item 9 of the dataset, as the one before it did"):
        read(Drawn(die), 2)


@pytest.mark.parametrize("processes", [0, 2])
def test_an_item_that_cannot_be_read_is_named(processes: int) -> None:
    def refuse(row: int) -> None:
        if row == 11:
            raise ValueError("truncated picture")

    with pytest.raises(DataError, match="item 11 of the dataset cannot be read: ValueError: truncated picture"):
        read(Drawn(refuse), processes)


def test_no_process_is_left() -> None:
    others = set(psutil.Process().children())  # an earlier test may have left some
    ahead = feed(Drawn(), 2).ahead(range(100), [0])
    assert ahead is not None
    next(ahead)
    readers = set(psutil.Process().children()) - others
    assert len(readers) >= 2
    ahead.close()
    assert not psutil.wait_procs(readers, timeout=30)[1]


def test_an_evaluation_reads_all_rows_in_order() -> None:
    def rows(processes: int, indices: list[int]) -> list[list[str]]:
        reader = Reader(Drawn(), seed=7)
        lists = DatasetEvaluationFeed(reader, micro_batch=5, processes=processes)
        return [batch["name"] for batch in lists.ahead(indices)]

    assert rows(2, [0, 4]) == rows(0, [0, 4]) == [list("01234"), ["20", "21", "22", "23"]]
