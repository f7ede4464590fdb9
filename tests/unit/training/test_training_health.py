"""What is judged a spike, and that a judgement follows from a checkpoint's few whole numbers."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch
from torch import nn

from headway.config.sections.health import HealthConfig
from headway.training.health.decisions import Decision, History, decide, is_left_out, judge, remember
from headway.training.state import TrainState

CONFIG = HealthConfig(on_spike="skip", spike_window=32)


def after(steps: int, history: History, seed: int = 0, scale: float = 1.0) -> History:
    """What is usual after steps of a falling, noisy loss."""
    generator = random.Random(seed)
    for step in range(steps):
        loss = (3.0 + 2.0 * math.exp(-step / 50) + generator.gauss(0, 0.05)) * scale
        norm = 0.5 * math.exp(generator.gauss(0, 0.2))
        assert judge(CONFIG, history, loss, norm).kind == "good", f"a usual step ({step})"
        remember(CONFIG, history, loss, norm)
    return history


def test_a_usual_run_has_no_spike_and_an_unusual_step_is_one() -> None:
    history = after(300, History())
    usual = judge(CONFIG, history, 3.05, 0.6)
    assert usual.kind == "good" and abs(usual.metrics["health/loss_deviations"]) < 3
    assert judge(CONFIG, history, 4.5, 0.5).kind == "spike"
    spike = judge(CONFIG, history, 3.0, 50.0)
    assert spike.kind == "spike" and "grad norm of 50" in spike.reason
    assert judge(CONFIG, history, 3.0, 5.0).kind == "good", "ten times the norm (12 deviations), with the usual loss"
    both = judge(CONFIG, history, 3.3, 5.0)
    assert both.kind == "spike" and "the loss" not in both.reason, "and with a loss that has moved"
    assert judge(CONFIG, history, 0.5, 0.001).kind == "good", "only what is above is one"
    assert judge(CONFIG, History(), 1e9, 1e9).kind == "good", "nothing is known yet"
    assert judge(CONFIG, history, math.nan, 1.0).kind == "nonfinite"
    assert judge(CONFIG.model_copy(update={"on_spike": "off"}), history, 4.5, 50.0).kind == "good"


def test_one_spike_that_is_accepted_does_not_make_the_next_one_usual() -> None:
    history = after(300, History())
    remember(CONFIG, history, 1e6, 1e6)
    assert judge(CONFIG, history, 100.0, 100.0).kind == "spike"


def test_a_judgement_goes_on_exactly_from_the_numbers_of_a_checkpoint() -> None:
    whole = after(200, History())
    state = TrainState(nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)]), decides=True)
    state.history = after(100, History())
    record = json.loads(json.dumps(state.cursor_record()))
    assert all(isinstance(value, int) and 0 <= value < 2**32 for value in record.values())
    resumed = TrainState(nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)]), decides=True)
    resumed.take_cursor(record)
    assert resumed.history == state.history != whole
    assert resumed.cursor_record() == record
    state.decides = False
    assert set(state.cursor_record()) == {"step", "skipped_steps", "skipped_in_row"}, "a warning needs no memory"


@pytest.mark.parametrize(
    ("step", "leave_out", "first"), [(9, 1, 9), (9, 4, 6), (2, 8, 0)], ids=["one", "several", "from the start"]
)
def test_a_rollback_is_about_steps_that_do_not_depend_on_checkpoints(step: int, leave_out: int, first: int) -> None:
    config = HealthConfig(on_nonfinite="rollback", leave_out_steps=leave_out)
    decision = decide(config, judge(config, History(), math.inf, 1.0), step)
    assert decision == Decision(step, "rollback", "the loss is not finite", first)
    assert decide(config, judge(config, History(), 1.0, 1.0), step) is None


def test_left_out_ranges() -> None:
    assert [step for step in range(8) if is_left_out([(2, 4), (6, 7)], step)] == [2, 3, 6]
