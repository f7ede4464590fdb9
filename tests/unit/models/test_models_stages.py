"""A decoder of which only some stages are there."""

from __future__ import annotations

import pytest
import torch

from headway.config import ModelConfig
from headway.models.build import build_model
from headway.models.decoder import Decoder
from headway.models.facts import flops_per_token, part_costs
from headway.training.optimizer import hidden_matrices

STAGES = [range(1), range(1, 3), range(3, 4)]


def config(tied: bool) -> ModelConfig:
    return ModelConfig(vocab_size=64, dim=16, layers=4, heads=2, ffn_dim=32, tie_embeddings=tied)


def build(tied: bool, stages: list[range] | None = None) -> Decoder:
    return build_model(config(tied), vocab_size=64, seed=5, stages=stages)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dealt", [[[0], [1], [2]], [[0, 2], [1]]])
def test_stages_together_are_the_model(tied: bool, dealt: list[list[int]]) -> None:
    whole = build(tied)
    parts = [build(tied, [STAGES[n] for n in numbers]) for numbers in dealt]
    seen: dict[str, int] = {}
    for part in parts:
        for name, weight in part.state_dict().items():
            assert torch.equal(weight, whole.state_dict()[name]), name
            seen[name] = seen.get(name, 0) + 1
    assert seen.keys() == whole.state_dict().keys()
    shared = {name for name, times in seen.items() if times > 1}
    assert shared == ({"embedding.weight"} if tied and len(dealt) == 3 else set())
    assert [len(part.shared_between_stages()) for part in parts] == ([1, 0, 1] if shared else [0] * len(parts))

    ids, targets = torch.randint(0, 64, (2, 8)), torch.randint(0, 64, (2, 8))
    x = None
    for number, stage in enumerate(STAGES):
        part = parts[next(place for place, numbers in enumerate(dealt) if number in numbers)]
        y = part(ids, targets, stage=stage, x_BTD=x)
        if number < len(STAGES) - 1:
            like = part.stage_output(ids)
            assert (y.shape, y.dtype) == (like.shape, like.dtype)
        x = y
    assert torch.equal(x, whole(ids, targets))


def test_a_stage_has_the_memory_of_its_own_layers_only() -> None:
    sizes = [sum(p.numel() for p in build(False, [stage]).parameters()) for stage in STAGES]
    assert sum(sizes) == sum(p.numel() for p in build(False).parameters())


@pytest.mark.parametrize("stage", STAGES)
def test_no_hidden_matrix_is_taken_for_the_output_projection_of_another_stage(stage: range) -> None:
    part = build(False, [stage])
    assert len(hidden_matrices(part)) == 4 * len(stage)
    assert (part.output_projection() is not None) == (stage == STAGES[-1])


def test_costs_of_the_parts_are_those_of_the_whole() -> None:
    shape = config(True)
    costs = part_costs(shape, 8)
    assert sum(costs.layers) + costs.head + costs.embedding == pytest.approx(flops_per_token(shape, 8))
    assert costs.head == 6 * 64 * 16
