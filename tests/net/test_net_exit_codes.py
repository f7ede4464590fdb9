"""Commands end with the exit codes that schedulers and scripts know."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from net.runs import VALUES, kept_copy, newest_checkpoint, write_run_config
from support.runs import headway

ENDS = {
    "done": (0, "", ()),
    "a usage that is wrong": (2, "", ("--no-such-option",)),
    "a config that is wrong": (2, "", ("train.no_such_key=1",)),
    "data that is not there": (3, "", ("data.store=nowhere", "data.sources=[nowhere.jsonl]")),
    "a disk that is full at the end": (4, "enospc@checkpoint.shard", ("checkpoint.every=100 steps",)),
    "divergence": (5, "nan@gradient=1,nan@gradient=2", ("train.skip_limit=2",)),
    "a budget that is spent": (6, "", ("cost.usd_per_hour=3600", "budget.usd=0.01")),
    "a preemption": (75, "stop@step=1", ()),
    "a worker that dies too often": (1, "kill@step=1", ("supervise.max_failures=0",)),
}


@pytest.mark.parametrize("end", ENDS)
def test_training_ends_with_its_exit_code(end: str, tmp_path: Path) -> None:
    code, faults, words = ENDS[end]
    config = write_run_config(tmp_path)
    done = headway("train", config.name, "train.steps=3", *words, faults=faults, cwd=tmp_path)
    assert done.returncode == code, done.stderr[-3000:]


def test_reading_commands_end_with_their_exit_codes(tmp_path: Path) -> None:
    folder = kept_copy(tmp_path)
    checkpoint = newest_checkpoint(folder / "trained" / "earlier")

    def code(*words: str) -> int:
        return headway(*words, cwd=folder).returncode

    assert code("checkpoints", "verify", "trained/earlier") == 0
    assert code("eval", "trained/none") == 2
    values = {**VALUES, "name": "none", "data": {**VALUES["data"], "sources": ["none.jsonl"], "store": "new"}}
    (folder / "none.yaml").write_text(yaml.safe_dump(values))
    assert code("data", "prepare", "none.yaml") == 3
    shard = next(checkpoint.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert code("checkpoints", "verify", "trained/earlier") == 4
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps({**manifest, "step": 7}))
    assert code("train", "config.yaml") == 4
