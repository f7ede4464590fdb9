"""A run that begins with smaller batches: the same rows, once each, whatever dies and on any number of workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.telemetry.metrics import read_metrics
from headway.telemetry.record import open_run
from support.runs import config_values, headway, state_hash, write_corpus

RAMP = [{"global_batch": 4, "until": "3 steps"}, {"global_batch": 8, "until": "900 tokens"}]
#: 3 steps of 4 rows (384 tokens), 2 of 8 (896), and 6 of 16 rows of 32 tokens.
ROWS = [4] * 3 + [8] * 2 + [16] * 6


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of two sources; rows become shorter in the ramp."""
    folder = tmp_path_factory.mktemp("ramp")
    write_corpus(folder)
    write_corpus(folder / "more", documents=30)
    sources = [
        {"path": str(folder / "corpus.jsonl"), "weight": 3},
        {"path": str(folder / "more" / "corpus.jsonl"), "name": "more", "weight": 1},
    ]
    stages = [{"start": "4 steps", "sequence_length": 16}]
    values = config_values(
        folder,
        data={"sources": sources, "mixture": {"stages": stages}},
        train={"steps": None, "tokens": 3968, "global_batch": 16, "batch_ramp": RAMP, "lanes": 4},
        determinism="elastic",
        checkpoint={"every": "512 tokens", "keep": 20},
        evaluation={"rows": 8, "every": "1024 tokens"},
    )
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    assert headway("data", "prepare", path).returncode == 0
    return path


def train(config: Path, name: str, workers: int, faults: str = "") -> tuple[Path, int]:
    result = headway("train", config, f"name={name}", "-w", str(workers), faults=faults)
    return config.parent / "runs" / name, result.returncode


@pytest.mark.slow
def test_kills_in_the_ramp_and_other_numbers_of_workers_change_no_bit(config: Path) -> None:
    one, code = train(config, "one", 1)
    assert code == 0
    two, code = train(config, "two", 2)
    assert code == 0
    assert train(config, "killed", 2, faults="kill@step=5")[1] != 0
    killed, code = train(config, "killed", 1)
    assert code == 0
    assert state_hash(one) == state_hash(two) == state_hash(killed)

    metrics = read_metrics(one)
    assert metrics.series("train/items")[1].tolist() == [32 * rows for rows in ROWS]
    # Every 512 tokens, at the first step by which so many have been trained on: 384, 640, 896, 1408, ...
    saved = [checkpoint.step for checkpoint in open_run(one).checkpoints]
    assert saved == [4, 6, 7, 8, 9, 10, 11]
    assert metrics.series("evaluation/loss")[0].tolist() == [6, 8, 10, 11]
    assert open_run(one).tokens == 3968

    proof = json.loads(headway("ledger", killed, "--json").stdout)
    assert proof["proven"] and proof["steps"] == 11
    # Rows of 32 tokens in 4 steps, then rows of 16.
    assert proof["rows"] == proof["looked_at_rows"] == sum(ROWS[:4]) + 2 * sum(ROWS[4:])
    assert {commit["attempt"] for commit in proof["commits"]} == {1, 2}
    # Three quarters of the rows are of the first source, in the ramp too.
    shares = [(commit["rows"]["corpus"], commit["rows"]["more"]) for commit in proof["commits"]]
    assert shares[0] == (15, 5) and all(a == 3 * b for a, b in shares)


def test_the_preview_of_a_step_has_its_rows(config: Path) -> None:
    def view(step: int) -> dict[str, Any]:
        result = headway("data", "preview", config, "--step", str(step), "--rows", "0", "--json")
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)  # type: ignore[no-any-return]

    first, last = view(0), view(10)
    assert (first["lanes"], first["micro_batches"], first["micro_batch"]) == (4, 1, 1)
    assert (last["lanes"], last["micro_batches"], last["micro_batch"]) == (4, 4, 2)
    assert (len(first["rows"]), len(last["rows"])) == (4, 32)
    rows = [(row["source"], row["epoch"], row["source_row"]) for row in first["rows"]]
    assert len(set(rows)) == 4
