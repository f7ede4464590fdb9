"""A matrix of real cells, of which one is killed and one fails on purpose, as a user runs it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from support import headway

SUITE = """
strategy: [ddp, zero1, zero2, single]
workers: 2
model: 1m
micro_batch: 1
sequence_length: 32
vocab_size: 256
warmup_steps: 1
steps: 2
profiled_steps: 1
repeats: 1
config: {train: {device: cpu}, parallel: {threads: 1}}
faults:
  - {strategy: zero1, order: kill@step=2%1}
  - {strategy: zero2, order: crash@backward=1%0}
"""
NAMES = {strategy: f"{strategy}-w2-1m-fp32-b1-t32" for strategy in ("ddp", "zero1", "zero2", "single")}


@pytest.mark.timeout(900)
def test_a_matrix_completes_whatever_happens_to_its_cells(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "trial.yaml").write_text(SUITE)
    first = headway("bench", "trial.yaml", "--output", "out", "--timeout", "200", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    cells = {path.name.split("-w2")[0]: json.loads(path.read_bytes()) for path in (tmp_path / "out/cells").iterdir()}
    ends = {name: cell["repeats"][-1] for name, cell in cells.items()}
    assert {name: end["status"] for name, end in ends.items()} == {
        "ddp": "ok",
        "zero1": "killed",
        "zero2": "failed",
        "single": "refused",
    }
    assert ends["zero1"]["reason"] == "worker 1 died (signal 9)"
    assert ends["zero2"]["reason"] == "worker 0: RuntimeError: ordered by HEADWAY_FAULTS at backward=1"
    assert "cannot use 2 workers" in ends["single"]["reason"]

    found = ends["ddp"]["measured"]
    assert found["items"] == 2 * 2 * 32 and len(found["step_seconds"]) == 2
    assert found["tokens_per_second"] == pytest.approx(found["items"] / sum(found["step_seconds"]), rel=0.05)
    assert 0 < found["mean_loss"] < 7 and found["mfu"] is None
    # Weights, gradients and AdamW's two moments in fp32, and what a step takes.
    state = 16 * found["parameters"]
    assert state < found["peak_memory_bytes"] < 2 * state
    assert 0 < found["communication"]["total_share"] < 1

    page = (tmp_path / "out/report.md").read_text()
    assert "3 of 4 cells did not come out:" in page
    assert f"- {NAMES['zero1']}: killed: worker 1 died (signal 9)" in page
    with (tmp_path / "out/metrics.csv").open() as file:
        assert {line["strategy"]: line["status"] for line in csv.DictReader(file)}["zero2"] == "failed"

    # The log of the pod is all that is left; and the same command finds nothing to do.
    prefixed = "".join(f"2026-01-01T00:00:00Z stderr F [rank0]: {line}\n" for line in first.stderr.splitlines())
    collected = headway("bench", "collect", "-", "-o", "again", "--json", cwd=tmp_path, input=prefixed)
    assert len(json.loads(collected.stdout)["cells"]) == 4
    for path in (tmp_path / "out/cells").iterdir():
        assert json.loads(path.read_bytes()) == json.loads((tmp_path / "again/cells" / path.name).read_bytes())
    logs = sorted((tmp_path / "out/logs").iterdir())
    second = headway("bench", "trial.yaml", "--output", "out", cwd=tmp_path)
    assert second.returncode == 0 and "4 of 4 measurements are there already" in second.stderr
    assert sorted((tmp_path / "out/logs").iterdir()) == logs, "nothing was started"
