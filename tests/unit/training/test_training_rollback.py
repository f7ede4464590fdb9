"""Going back to an earlier checkpoint, as the supervisor sees it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headway.core.coordination.heartbeat import Phase
from headway.training.health import rollback
from headway.training.health.decisions import Decision


def test_reading_a_large_checkpoint_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of it has the time that a save may take, not that of a step."""
    told: list[Any] = []

    def planned(job: Any, decision: Decision) -> tuple[Decision, None]:
        told.append("planned")
        return Decision(decision.step, "rollback", decision.reason, decision.first_step, to_step=4), None

    monkeypatch.setattr(rollback, "beat", told.append)
    monkeypatch.setattr(rollback, "_plan_rollback", planned)
    job: Any = SimpleNamespace(
        world=SimpleNamespace(is_first=False),
        callbacks=[],
        rewinder=SimpleNamespace(rewind=lambda job, step: told.append(f"at step {step}")),
        evaluations=SimpleNamespace(go_back=lambda step: told.append(f"evaluations up to {step}")),
        state=SimpleNamespace(skipped_ranges=(), cursor=SimpleNamespace(step=4)),
    )
    feed: Any = SimpleNamespace(rewind=lambda step: None)
    result: Any = SimpleNamespace(decision=Decision(6, "rollback", "the loss is not finite", 6))
    assert rollback.roll_back(job, feed, result)
    assert told == [Phase.CHECKPOINT, "planned", Phase.CHECKPOINT, "at step 4", "evaluations up to 4"]
    assert job.state.skipped_ranges == ((6, 7),)
