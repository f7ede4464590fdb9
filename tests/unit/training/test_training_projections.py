"""Muon and Adafactor by projection: what holds several is updated as if each had a matrix of its own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from headway.config import ModelConfig
from headway.config.schema import OptimizerConfig
from headway.core.types import Fusion
from headway.models.build import build_model
from headway.models.decoder import Decoder
from headway.training.optimizer import build_optimizer, muon
from headway.training.optimizer.adafactor import ProjectionAdafactor
from headway.training.optimizer.muon import ProjectionMuon
from support.projections import apart, distance, exact

CPU = torch.device("cpu")
RATE, DECAY = 0.02, 0.1
SHAPES: dict[str, dict[str, Any]] = {
    # More heads than width: queries have more rows than columns, and so another step size than keys and values.
    "grouped": {"heads": 6, "kv_heads": 2, "head_dim": 8, "qkv_bias": True},
    "experts": {"heads": 4, "experts": 4, "shared_experts": 1, "expert_ffn_dim": 24, "dense_layers": 1},
    "mamba": {
        "heads": 4,
        "layer_pattern": "M*-",
        "mamba": {"heads": 8, "head_dim": 8, "state_dim": 4, "groups": 2, "chunk": 4},
        "rotary_fraction": 0.0,
    },
}


def make_decoder(kind: str) -> Decoder:
    shape = ModelConfig(vocab_size=64, dim=32, layers=3, ffn_dim=48, **SHAPES[kind])
    return build_model(shape, vocab_size=64, seed=1)


def of_pytorch(start: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
    weight = nn.Parameter(start.clone())
    optimizer = torch.optim.Muon([weight], lr=RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    return (weight.detach() - start).double()


def gradients_of(name: str, p: torch.Tensor) -> torch.Tensor:
    """Of three steps. Rows differ in size, as those of projections do, and singular values are spread."""
    generator = torch.Generator().manual_seed(len(name))
    some = torch.randn(3, *p.shape, generator=generator)
    return some * torch.rand(p.shape[0], *[1] * (p.ndim - 1), generator=generator).add(0.1)


@pytest.mark.parametrize("products", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SHAPES)
def test_every_projection_is_updated_as_if_it_had_a_matrix_of_its_own(kind: str, products: torch.dtype) -> None:
    model = make_decoder(kind)
    settings = OptimizerConfig.model_validate(
        {"name": "muon", "learning_rate": RATE, "weight_decay": DECAY, "projections": "apart"}
    )
    optimizer = build_optimizer(settings, model, CPU, products=products)
    hidden = {id(p) for p in optimizer.parts[1].param_groups[0]["params"]}
    named = {name: p for name, p in model.named_parameters() if id(p) in hidden}
    starts = {name: p.detach().clone() for name, p in named.items()}
    gradients = {name: gradients_of(name, p) for name, p in named.items()}
    for step in range(3):
        for name, p in named.items():
            p.grad = gradients[name][step].clone()
        optimizer.step()
    several = 0
    for name, p in named.items():
        change = apart(model.config, name, p.detach() - starts[name])
        start = apart(model.config, name, starts[name])
        steps = [apart(model.config, name, gradient) for gradient in gradients[name]]
        several += len(change) > 1
        for part, mine in change.items():
            along = torch.stack([cut[part] for cut in steps])
            # PyTorch rounds to bf16 in every iteration; fp32 differs from fp64 in its last bits only.
            assert distance(mine.double(), of_pytorch(start[part], along)) < 0.02, (name, part)
            if products == torch.float32:
                assert distance(mine.double(), exact(start[part], along, RATE, DECAY)) < 1e-4, (name, part)
    assert several == {"grouped": 6, "experts": 6, "mamba": 3}[kind]


@pytest.mark.parametrize("kind", SHAPES)
def test_adafactor_keeps_means_and_sizes_of_every_projection(kind: str) -> None:
    model = make_decoder(kind)
    settings = OptimizerConfig.model_validate({"name": "adafactor", "weight_decay": DECAY, "projections": "apart"})
    optimizer = build_optimizer(settings, model, CPU)
    assert isinstance(optimizer, ProjectionAdafactor)
    starts = {name: p.detach().clone() for name, p in model.named_parameters()}
    gradients = {name: gradients_of(name, p) for name, p in model.named_parameters()}
    for step in range(3):
        for name, p in model.named_parameters():
            p.grad = gradients[name][step].clone()
        optimizer.step()
    for name, p in model.named_parameters():
        cuts = partial(apart, model.config, name) if p.ndim == 2 else partial(apart_vector, model, name)
        found, start, steps = cuts(p.detach()), cuts(starts[name]), [cuts(g) for g in gradients[name]]
        for part, mine in found.items():
            alone = nn.Parameter(start[part].clone())
            decay = DECAY if p.ndim > 1 else 0.0
            theirs = torch.optim.Adafactor([alone], lr=settings.learning_rate, weight_decay=decay)
            for cut in steps:
                alone.grad = cut[part].clone()
                theirs.step()
            torch.testing.assert_close(mine, alone.detach(), rtol=1e-5, atol=1e-7, msg=f"{name}, {part}")


def apart_vector(model: Decoder, name: str, vector: torch.Tensor) -> dict[str, torch.Tensor]:
    if not name.endswith("qkv.bias"):
        return {"": vector}
    parts = apart(model.config, name.replace("bias", "weight"), vector[:, None])
    return {part: bias.flatten() for part, bias in parts.items()}


def test_adafactor_may_find_projections_in_columns() -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(16, 24), torch.randn(3, 16, 24)
    weights = [nn.Parameter(start.clone()), nn.Parameter(start.T.contiguous())]
    rows = Fusion((5, 7), 2)
    fusions = {weights[0]: replace(rows, by_columns=True), weights[1]: rows}
    optimizer = ProjectionAdafactor([{"params": weights}], 0.05, fusions)
    for gradient in gradients:
        weights[0].grad, weights[1].grad = gradient.clone(), gradient.T.contiguous()
        optimizer.step()
    torch.testing.assert_close(weights[0], weights[1].T)
    assert {key: tuple(t.shape) for key, t in optimizer.state[weights[0]].items() if t.ndim} == {
        "row_var": (16, 2),
        "col_var": (1, 24),
    }


def test_one_step_of_a_fused_matrix_as_a_whole_is_another() -> None:
    """What the distances above are compared with."""
    model = make_decoder("grouped")
    weight = model.layers[0].attention.qkv.weight
    steps = gradients_of("qkv", weight)[:1]
    whole = apart(model.config, "qkv.weight", of_pytorch(weight.detach(), steps))
    ours = apart(model.config, "qkv.weight", weight.detach())
    each = {
        part: of_pytorch(start, apart(model.config, "qkv.weight", steps[0])[part][None]) for part, start in ours.items()
    }
    assert min(distance(whole[part], each[part]) for part in each) > 0.1


def test_projections_may_lie_in_columns() -> None:
    """As those of a `Conv1D` of transformers, whose weight is (inputs, outputs)."""
    torch.manual_seed(0)
    start, gradient = torch.randn(16, 24), torch.randn(16, 24)
    weights = [nn.Parameter(start.clone()), nn.Parameter(start.T.clone())]
    fusion = Fusion((5, 7), 2)
    columns = Fusion((5, 7), 2, by_columns=True)
    optimizer = ProjectionMuon(weights, torch.float32, {weights[0]: columns, weights[1]: fusion}, lr=RATE)
    weights[0].grad, weights[1].grad = gradient.clone(), gradient.T.clone()
    optimizer.step()
    torch.testing.assert_close(weights[0], weights[1].T)
    assert optimizer.projection_shapes(weights[0]) == [(10, 16), (14, 16)]


def test_matrices_of_one_projection_have_the_bits_of_pytorchs() -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(24, 16), torch.randn(3, 24, 16)
    ours = nn.Parameter(start.clone())
    options: dict[str, Any] = {"lr": RATE, "weight_decay": DECAY, "adjust_lr_fn": "match_rms_adamw"}
    optimizer = ProjectionMuon([ours], **options)
    for gradient in gradients:
        ours.grad = gradient.clone()
        optimizer.step()
    assert torch.equal((ours.detach() - start).double(), of_pytorch(start, gradients))


def test_small_matrices_of_one_shape_share_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of fused matrices, tall ones, and as many as a batch may take; large ones and others stay apart."""
    monkeypatch.setattr(muon, "_BATCH_ROWS", 16)
    monkeypatch.setattr(muon, "_BATCH_ELEMENTS", 2000)
    shapes = [(8, 24), (24, 8), (8, 24), (24, 8), (16, 24), (8, 40), (17, 20), (17, 20), (8, 24), (8, 24)]
    generator = torch.Generator().manual_seed(2)
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    gradients = [torch.randn(shape, generator=generator) for shape in shapes]
    sizes, ends = list[torch.Size](), []
    batch = muon.orthogonalized_batch
    monkeypatch.setattr(muon, "orthogonalized_batch", lambda x, group: (sizes.append(x.shape), batch(x, group))[1])
    for batches in (True, False):
        weights = [nn.Parameter(tensor.clone()) for tensor in start]
        fused = {weights[4]: Fusion((4, 4), 2)}
        optimizer = ProjectionMuon(weights, torch.bfloat16, fused, batches=batches, lr=RATE)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
        ends.append([weight.detach() for weight in weights])
    assert [tuple(size) for size in sizes] == [(4, 8, 24), (2, 24, 8), (2, 8, 24)]
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=RATE * 0.02)


def test_matrices_share_products_unless_their_bits_must_not_depend_on_others() -> None:
    model = nn.Sequential(nn.Embedding(4, 8), *(nn.Linear(8, 8) for _ in range(3)))
    config = OptimizerConfig.model_validate({"name": "muon", "learning_rate": RATE})
    for elastic in (False, True):
        parts = build_optimizer(config, model, torch.device("cpu"), elastic=elastic).parts  # type: ignore[attr-defined]
        assert parts[1].shares_products is not elastic
