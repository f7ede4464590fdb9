"""The ledger of a `Trainer` run is proven too, although nobody but the script has the dataset."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway.api import Trainer
from headway.config import Config
from headway.core.errors import Preempted
from headway.core.files.atomic import append_json_line
from headway.core.process import faults
from headway.run.directory import ledger
from headway.run.directory.ledger_proof import prove
from support.runs import state_hash


class Numbers:
    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> torch.Tensor:
        if not 0 <= index < 37:
            raise IndexError(index)
        return torch.tensor([float(index)])


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def config(folder: Path) -> Config:
    values: dict[str, Any] = {
        "name": "numbers",
        "runs": str(folder),
        "train": {"steps": 12, "global_batch": 8, "device": "cpu"},
        "parallel": {"threads": 1},
        "checkpoint": {"every": "5 steps"},
        "telemetry": {"report": False},
    }
    return Config.model_validate(values)


def test_a_line_that_finds_no_place_is_made_up_for_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = 0

    def append(path: Path, value: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls <= 2:  # what is reserved for records is not enough either
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append_json_line(path, value, **options)

    monkeypatch.setattr(ledger, "append_json_line", append)
    run = Trainer(nn.Linear(1, 1), Numbers(), loss, config(tmp_path)).fit()
    assert "the ledger cannot be written: No space left on device; training continues" in capsys.readouterr().err
    assert calls > 2 and prove(run.directory).problems == []


def test_a_trainer_run_is_proven_row_by_row(tmp_path: Path) -> None:
    run = Trainer(nn.Linear(1, 1), Numbers(), loss, config(tmp_path)).fit()
    proof = prove(run.directory)
    assert (proof.problems, proof.steps, proof.rows, proof.looked_at) == ([], 12, 96, 96)
    assert [(e.first_epoch, e.last_epoch, e.rows, e.used) for e in proof.epochs] == [(0, 1, 37, 37), (2, 2, 37, 22)]
    file = run.directory / "ledger.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        line["epoch_rows"] = 36
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert any("another plan of rows" in problem for problem in prove(run.directory).problems)


def overflowing(folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> Trainer:
    """A run in fp16 whose gradient overflows at steps 3 and 7."""
    monkeypatch.setattr(faults, "_passed", type(faults._passed)())
    monkeypatch.setenv("HEADWAY_FAULTS", ",".join(["nan@gradient=3", "nan@gradient=7", *more]))
    half = config(folder).model_copy(update={"train": config(folder).train.model_copy(update={"precision": "fp16"})})
    torch.manual_seed(0)
    return Trainer(nn.Linear(1, 1), Numbers(), lambda model, batch: loss(model, batch / 100), half)


def test_the_ledger_names_steps_that_only_the_loss_scale_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = overflowing(tmp_path / "whole", monkeypatch).fit().directory
    assert "overflow" not in capsys.readouterr().err, "nothing is wrong with such a step"
    with pytest.raises(Preempted):
        overflowing(tmp_path / "broken", monkeypatch, "stop@step=4").fit()
    broken = overflowing(tmp_path / "broken", monkeypatch).fit().directory
    assert state_hash(whole) == state_hash(broken)
    for run in (whole, broken):
        proof = prove(run)
        assert (proof.problems, proof.rows, proof.not_updated, proof.skipped_ranges) == ([], 96, 2, [])
        assert [(d.first_step, d.last_step, d.action) for d in proof.decisions] == [(2, 3, "skip"), (6, 7, "skip")]
        assert "2 steps had no update" in proof.basis[-1] and "the ledger names 2" in proof.basis[-1]


def test_a_full_disk_is_no_end_for_a_step_that_only_the_loss_scale_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def append(path: Path, value: Any, **options: Any) -> None:
        if value["kind"] == "decision":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append_json_line(path, value, **options)

    monkeypatch.setattr(ledger, "append_json_line", append)
    run = overflowing(tmp_path, monkeypatch).fit().directory
    assert "training continues, and the ledger lacks that step 2 had no update" in capsys.readouterr().err
    proof = prove(run)
    assert not proof.problems and "2 steps had no update" in proof.basis[-1] and "names 0" in proof.basis[-1]
