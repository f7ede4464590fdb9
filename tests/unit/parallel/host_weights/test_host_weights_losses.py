"""Losses of runs with weights in bf16 at a small learning rate, next to those of fp32 weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distributed.streaming_peak import assembled, config
from headway.training.optimizer import set_learning_rate, update

VOCAB = 64
STEPS = 200
LAST = 50
RATE = 1e-5


def losses(weights: str, seed: int, runs: Path, *, rounded: bool = False) -> torch.Tensor:
    """Train on rows of a fixed random walk over tokens; return the loss of every step.

    Args:
        rounded: Round weights to bf16, to nearest, after each update.
    """
    asked = config("fresh", "native", weights, str(runs))
    shape = {"dim": 64, "layers": 2, "heads": 4, "ffn_dim": 128, "vocab_size": VOCAB, "init_std": 0.05}
    made = assembled(asked.model_copy(update={"seed": seed, "model": asked.model.model_copy(update=shape)}), VOCAB)
    state = made.state
    set_learning_rate(state.optimizer, RATE)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(STEPS):
        # The next token is one of two that depend on the last one.
        steps = torch.randint(1, 3, (16, 33), generator=generator)
        rows = (torch.randint(VOCAB, (16, 1), generator=generator) + steps.cumsum(1)) % VOCAB
        made.strategy.begin()
        with made.strategy.micro_batch(True, True), torch.autocast("cpu", torch.bfloat16):
            loss = state.trained(rows[:, :-1], rows[:, 1:].contiguous())
            loss.backward()
        made.strategy.end_lane()
        made.strategy.reduce()
        scale = 1 / (16 * 32)
        if state.engine is None:
            update(state.optimizer, scale)
        else:
            state.engine.norm_parts()
            state.engine.update(scale)
        if rounded:
            for p in made.task.model.parameters():
                p.data.copy_(p.data.bfloat16())
        found.append(float(loss.detach()) * scale)
    return torch.tensor(found)


@pytest.mark.slow
def test_masters_or_random_rounding_keep_the_losses_of_fp32(tmp_path: Path) -> None:
    """Within the spread of three seeds; without either the losses leave it, since updates are lost."""
    seeds = range(3)
    kinds = {"fp32": "fp32", "bf16": "bf16", "stochastic": "bf16_stochastic"}
    found = {kind: [losses(weights, seed, tmp_path) for seed in seeds] for kind, weights in kinds.items()}
    found["nearest"] = [losses("fp32", seed, tmp_path, rounded=True) for seed in seeds]
    last = {kind: torch.stack(of)[:, -LAST:].mean(1) for kind, of in found.items()}
    spread = float(last["fp32"].max() - last["fp32"].min())
    away = {kind: float((of - last["fp32"]).abs().max()) for kind, of in last.items()}
    assert away["bf16"] < spread and away["stochastic"] < spread < away["nearest"], (spread, away)
