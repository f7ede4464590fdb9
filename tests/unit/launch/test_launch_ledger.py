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

from headway.config import Config
from headway.core.files import append_json_line
from headway.launch.api import Trainer
from headway.supervise import ledger
from headway.supervise.ledger_proof import prove


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

    def append(path: Path, value: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append_json_line(path, value)

    monkeypatch.setattr(ledger, "append_json_line", append)
    run = Trainer(nn.Linear(1, 1), Numbers(), loss, config(tmp_path)).fit()
    assert "the ledger cannot be written: No space left on device; training goes on" in capsys.readouterr().err
    assert calls > 1 and prove(run.directory).problems == []


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
