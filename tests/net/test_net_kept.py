"""A run that earlier code has left is read, proven, exported and continued."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from net.runs import KEPT, KEPT_RUN, RECORDED_STATES, continue_kept, kept_copy, newest_checkpoint, processor, state_name
from support.runs import headway

#: Of the kept checkpoint, written in two parts by two workers.
KEPT_STATE = "6ad95caa0b66fb9ea9264e281ead719d4ef04dce2080cf3faa256fa51d3d4c9e"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return kept_copy(tmp_path)


def command(folder: Path, *words: str) -> str:
    """Run a command that succeeds; returns its result."""
    done = headway(*words, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def as_json(folder: Path, *words: str) -> Any:
    """Run a command that succeeds; returns its result as JSON."""
    return json.loads(command(folder, *words, "--json"))


def test_commands_read_the_kept_run(folder: Path) -> None:
    run = "trained/earlier"
    assert state_name(newest_checkpoint(folder / run)) == KEPT_STATE

    (verified,) = as_json(folder, "checkpoints", "verify", run)
    assert verified["good"] and verified["step"] == 8
    (listed,) = as_json(folder, "checkpoints", "list", run)
    assert listed["state_sha256"] == KEPT_STATE

    proof = as_json(folder, "ledger", run)
    assert proof["proven"] and proof["steps"] == 8
    commits = [(commit["first_step"], commit["last_step"], commit["attempt"]) for commit in proof["commits"]]
    assert commits == [(0, 2, 1), (2, 4, 1), (4, 6, 2), (6, 8, 3)]
    assert [rollback["to_step"] for rollback in proof["rollbacks"]] == [6]

    shown = as_json(folder, "runs", "show", run)
    assert [attempt["number"] for attempt in shown["attempt_list"]] == [1, 2, 3]
    assert [checkpoint["step"] for checkpoint in shown["checkpoint_list"]] == [8]
    assert len(shown["segment_list"]) == 2
    assert [found["name"] for found in as_json(folder, "runs", "list", "trained")] == ["earlier"]

    evaluated = as_json(folder, "eval", run)
    assert evaluated["step"] == 8 and evaluated["loss"] == pytest.approx(5.09984, rel=1e-4)

    command(folder, "export", run, "exported")
    exported = load_file(folder / "exported" / "model.safetensors")
    assert exported["model.embed_tokens.weight"].shape == (270, 8)
    assert (folder / "exported" / "tokenizer.json").read_bytes() == (
        folder / "store" / "tokenizer" / "tokenizer.json"
    ).read_bytes()


def test_the_kept_run_goes_on_from_its_very_state_with_any_number_of_workers(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The state after loading is the recorded one; the end is that of one worker too, and is proven."""
    ends = {}
    for place, workers, strategy in ((folder, 2, "zero3"), (kept_copy(tmp_path_factory.mktemp("alone")), 1, "auto")):
        said = continue_kept(place, workers, strategy)
        assert f"state {KEPT_STATE[:12]}" in said
        run = place / "trained" / "earlier"
        loaded, *steps = [json.loads(line) for line in (run / "hashes.jsonl").read_text().splitlines()]
        assert (loaded["step"], loaded["state_sha256"]) == (8, KEPT_STATE)
        assert [line["step"] for line in steps] == [9, 10]
        ends[workers] = state_name(newest_checkpoint(run))
        assert steps[-1]["state_sha256"] == ends[workers]
        proof = as_json(place, "ledger", "trained/earlier")
        assert proof["proven"] and proof["steps"] == 10
    assert ends[1] == ends[2]
    recorded = json.loads(RECORDED_STATES.read_text()).get(processor(), {}).get(KEPT_RUN)
    if recorded is None:
        pytest.skip(f"no end of the kept run is recorded for {processor()}: cd tests && python -m net states")
    assert ends[1] == recorded


def test_nothing_kept_names_the_machine_that_made_it() -> None:
    """Places are those of the neutral folders in which it was made, above all not that of this checkout."""
    here = f"{Path(__file__).resolve().parents[2]}/".encode()
    for file in (path for path in KEPT.rglob("*") if path.is_file()):
        content = file.read_bytes()
        assert not any(place in content for place in (here, b"/home/", b"/root/", b"/Users/")), file
        places = re.findall(rb"(?:^|[^\w.<>})/-])(/[A-Za-z][\w.-]*/)", content)
        assert {*places} <= {b"/opt/", b"/tmp/"}, file
