"""`headway profile`: whose time a step is, told apart on two workers, one of which is slow on purpose."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.lab.profiling.record import Profile
from support.runs import headway
from support.waits import LONG

#: Of the model below, counted by hand: attention, feed-forward, norms, projection; 6 per parameter, 12 L H Q T besides.
_PARAMETERS = 32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 64 + 3 * 32 + 320 * 32
_FLOPS_PER_TOKEN = 6 * _PARAMETERS + 12 * 1 * 4 * 8 * 32
_EMBEDDING = 320 * 32
_SLOW = ",".join(["slow@data=0%1"] * 15)  # a second and a half in each later step


@pytest.mark.slow
def test_a_slow_feed_of_one_worker_is_the_largest_loss(tiny: Callable[..., Path], tmp_path: Path) -> None:
    config = tiny(
        train={"steps": 40, "global_batch": 4, "micro_batch": 1, "lanes": 2},
        model={"layers": 1, "tie_embeddings": False},
        parallel={"workers": 2, "strategy": "ddp"},
        checkpoint={"every": "100 steps"},
    )
    output = tmp_path / "profile"
    result = headway(
        "profile", config, "--steps", "2", "--warmup", "1", "--output", output, "--json", faults=_SLOW, timeout=LONG
    )
    assert result.returncode == 0, result.stderr
    found = Profile.model_validate_json((output / "profile.json").read_bytes())
    assert json.loads(result.stdout)["verdict"] == found.verdict

    # Every moment is in one part, and the parts are what the loop itself measures.
    assert sum(row.share for row in found.rows) == pytest.approx(1.0)
    assert sum(row.slowest_seconds for row in found.rows) == pytest.approx(found.step_seconds)
    for worker in found.workers:
        assert len(worker.steps) == 2 and len(worker.traced_steps) == 2
        assert all(sum(step.parts.values()) == pytest.approx(step.seconds) for step in worker.steps)
        assert all(
            step.waiting.get(part, 0) <= seconds for step in worker.steps for part, seconds in step.parts.items()
        )

    # The loop's own clock begins after the fault, so it can be compared on the other worker only.
    without_host = found.workers[0].step_seconds - found.workers[0].part_seconds("host")
    assert without_host == pytest.approx(found.workers[0].metered_seconds, rel=0.05, abs=0.02)

    # The slow worker waits for its data, the other one for it.
    fast, slow = found.workers
    assert found.slowest == 1 and slow.part_seconds("data") > 1.5 > fast.part_seconds("data")
    assert fast.part_waiting("reduction") > slow.part_waiting("reduction")
    assert found.losses[0].parts == ["data"] and found.verdict.startswith("training waits for data on worker 1")
    assert 1.0 <= found.losses[0].seconds <= found.step_seconds
    assert "the feed by itself makes the batches" in found.losses[0].advice[0]  # so it is not the disk that is blamed

    # Work, by hand.
    work = slow.work
    assert work.forward_flops is not None and work.backward_flops is not None
    assert slow.items_per_step == 4 * 32
    assert work.forward_flops + work.backward_flops == pytest.approx(_FLOPS_PER_TOKEN * 4 * 32 / 2)
    layer, head = _PARAMETERS - 320 * 32 - 3 * 32, 320 * 32
    # The loss has its gradient in the forward pass. Attention has two products there, and five in the backward pass, of
    # which one is computed again.
    product = 2 * 32 * 32
    share = (2 * layer + 6 * head + 2 * product) / (6 * layer + 6 * head + 7 * product)
    assert work.forward_flops / (work.forward_flops + work.backward_flops) == pytest.approx(share)
    weights = 4 * (_PARAMETERS + _EMBEDDING)
    assert work.norm_bytes == weights and work.update_flops == 0
    # AdamW has two moments, and a number per tensor that counts its steps. All is read and written: its kernel clips.
    assert work.update_bytes == pytest.approx(8 * weights, rel=0.01)
    assert slow.memory.base_bytes == pytest.approx(4 * weights, rel=0.01)
    assert max(slow.memory.tensor_bytes) > slow.memory.base_bytes
    stall = slow.checkpoint_stall_seconds
    assert stall is not None and found.rows[-1].slowest_seconds == pytest.approx(stall / 100)

    # Files: whole ones, nothing else, and the run itself was never there.
    assert sorted(p.name for p in output.iterdir()) == [
        "profile.html", "profile.json", "trace-0.json.gz", "trace-1.json.gz",
    ]  # fmt: skip
    events = json.loads(gzip.decompress((output / "trace-1.json.gz").read_bytes()))["traceEvents"]
    marks = [event["name"] for event in events if event["name"] == "headway.backward" and event["ph"] == "X"]
    assert len(marks) == 2 * 2  # traced steps, micro-batches
    assert "trains" not in (page := (output / "profile.html").read_text()) and page.count("<svg") == 3
    assert not (tmp_path / "runs").exists()
