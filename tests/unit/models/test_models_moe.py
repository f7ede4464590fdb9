"""Routing, balance, losses of the router, and gradients against a reference that computes every expert."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from headway.config import ModelConfig
from headway.core.types import IGNORE_TARGET
from headway.models.build import build_model, complete
from headway.models.decoder import Decoder
from headway.models.layers import experts as products
from headway.models.layers.moe import (
    MixtureOfExperts,
    after_step,
    count_experts,
    summed_balance_loss,
    summed_z_loss,
    take_counts,
)
from headway.models.shape import Shape

SIZES = {"dim": 24, "layers": 2, "heads": 2, "ffn_dim": 20, "max_sequence_length": 32, "init_std": 0.3}
MIXTURE = {"experts": 5, "experts_per_token": 2, "expert_ffn_dim": 12}
SIGMOID = {**MIXTURE, "router_score": "sigmoid", "shared_experts": 2}


def config(**changes: Any) -> ModelConfig:
    return complete(ModelConfig(**{**SIZES, **MIXTURE, **changes}), 64)


def mixture(**changes: Any) -> MixtureOfExperts:
    torch.manual_seed(0)
    settings = config(**changes)
    layer = MixtureOfExperts(settings, Shape.of(settings))
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(0.0, 0.3)
        if layer.bias_E is not None:
            layer.bias_E.uniform_(-0.2, 0.2)
    return layer


def reference(layer: MixtureOfExperts, x_ND: torch.Tensor) -> torch.Tensor:
    """Every expert computes every token; those that a token did not choose get weight 0."""
    logits_NE = x_ND @ layer.router.weight.t()
    scores_NE = logits_NE.softmax(-1) if layer.score == "softmax" else logits_NE.sigmoid()
    ranked_NE = scores_NE.detach() + (0.0 if layer.bias_E is None else layer.bias_E)
    kth_N1 = ranked_NE.sort(-1, descending=True).values[:, layer.experts_per_token - 1 : layer.experts_per_token]
    weights_NE = scores_NE.where(ranked_NE >= kth_N1, 0.0)
    weights_NE = weights_NE / weights_NE.sum(-1, keepdim=True)
    y_ND = torch.zeros_like(x_ND)
    for e in range(ranked_NE.shape[1]):
        gate, up = (x_ND @ layer.experts.gate_up[e].t()).chunk(2, -1)
        y_ND = y_ND + weights_NE[:, e : e + 1] * ((F.silu(gate) * up) @ layer.experts.down[e].t())
    if layer.shared is not None:
        gate, up = layer.shared.gate_up(x_ND).chunk(2, -1)
        y_ND = y_ND + layer.shared.down(F.silu(gate) * up)
    return y_ND


@pytest.mark.parametrize("changes", [{}, SIGMOID, {"experts_per_token": 5}, {"experts_per_token": 1}])
def test_outputs_and_gradients_are_those_of_all_experts_computed(changes: dict[str, Any]) -> None:
    layer = mixture(**changes, router_z_loss=0.0, balance_loss=0.0).double()
    x = torch.randn(3, 7, 24, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 7, 24, dtype=torch.float64)
    parameters = [x, *layer.parameters()]
    mine, theirs = layer(x), reference(layer, x.flatten(0, 1)).view(3, 7, 24)
    # The router computes in fp32, also for a reference in fp64.
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    for p, a, b in zip(
        parameters,
        torch.autograd.grad((mine * weight).sum(), parameters),
        torch.autograd.grad((theirs * weight).sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda text, p=p: f"{tuple(p.shape)}: {text}")


def test_the_bias_counts_in_the_choice_alone() -> None:
    layer = mixture(router_score="sigmoid")
    assert layer.bias_E is not None
    layer.bias_E.copy_(torch.tensor([0.0, 0.0, 10.0, 0.0, 10.0]))
    routing = layer.route(torch.randn(50, 24))
    assert (routing.experts_NK.sort(-1).values == torch.tensor([2, 4])).all()
    chosen = routing.scores_NE.gather(1, routing.experts_NK)
    torch.testing.assert_close(routing.weights_NK, chosen / chosen.sum(-1, keepdim=True))


@pytest.mark.parametrize("align", [1, 8])
def test_places_are_sorted_by_expert_and_keep_the_order_of_tokens(align: int) -> None:
    experts_NK = torch.tensor([[3, 1], [1, 0], [3, 0], [1, 3]])
    counts = count_experts(experts_NK, 5)
    assert counts.tolist() == [2, 3, 0, 3, 0]
    places = products.sorted_places(experts_NK, counts, align)
    starts = [0, 8, 16, 24, 32] if align == 8 else [0, 2, 5, 5, 8]
    # No expert of a grouped product is without rows.
    assert places.ends_E.tolist() == ([8, 16, 24, 32, 40] if align == 8 else [2, 5, 5, 8, 8])
    assert places.rows == (48 if align == 8 else 8)  # 8 pairs and at most 5 x 8 rows between them
    expected = [[starts[3], starts[1]], [starts[1] + 1, starts[0]], [starts[3] + 1, starts[0] + 1]]
    assert places.row_NK.tolist() == [*expected, [starts[1] + 2, starts[3] + 2]]


def test_padding_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout that the grouped kernel wants, computed by the loop; what lies behind the last group is never used."""

    def product(x_RD: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        y = products.looped_product(x_RD, w, ends)
        return torch.cat([y, y.new_full((len(x_RD) - len(y), y.shape[1]), math.nan)])

    layer, x = mixture(**SIGMOID), torch.randn(2, 9, 24, requires_grad=True)
    results = []
    for grouped in (False, True):
        if grouped:
            monkeypatch.setattr(products, "has_grouped_kernel", lambda *tensors: True)
            monkeypatch.setattr(products, "grouped_product", product)
        y = layer(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_the_grouped_kernel_is_for_bf16_on_cuda_alone() -> None:
    assert not products.has_grouped_kernel(torch.zeros(4, 16, dtype=torch.bfloat16), torch.zeros(2, 16, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_kernel_and_loop_agree(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch has a slow path of the kernel for CPUs, so layouts and gradients can be tried here."""
    layer, results = mixture(**{**SIGMOID, "expert_ffn_dim": 16}).to(dtype), []
    x = torch.randn(2, 9, 24, dtype=dtype, requires_grad=True)
    for grouped in (False, True):
        monkeypatch.setattr(products, "has_grouped_kernel", lambda *tensors, yes=grouped: yes)
        y = layer(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])])
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * a.abs().max().item())


def test_losses_follow_their_formulas() -> None:
    logits = torch.randn(6, 4)
    counted = torch.tensor([True, True, False, True, True, False])[:, None]
    z = sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits[counted[:, 0]].tolist())
    assert summed_z_loss(logits, counted).item() == pytest.approx(z, rel=1e-5)

    scores = logits.softmax(-1)
    experts = scores.topk(1).indices
    loads = count_experts(experts, 4, counted)
    share = [sum(1 for i in range(6) if counted[i] and experts[i] == e) / 4 for e in range(4)]
    mean = scores[counted[:, 0]].mean(0).tolist()
    expected = 4 * 4 * sum(f * p for f, p in zip(share, mean, strict=True))  # of 4 experts, for 4 tokens
    found = summed_balance_loss(scores, loads, torch.tensor(4), 1, counted)
    assert found.item() == pytest.approx(expected, rel=1e-5)
    even = summed_balance_loss(torch.ones(8, 4), torch.full((4,), 4), torch.tensor(8), 2)
    assert even.item() == pytest.approx(8.0)


def decoder(**changes: Any) -> Decoder:
    return build_model(config(**changes), vocab_size=64, seed=0)


def gradients(model: Decoder, ids: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(ids, targets).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def batch(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(64, (rows, 17), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:].clone()


def test_the_z_loss_is_in_the_gradient_and_not_in_the_value() -> None:
    ids, targets = batch(3)
    targets[0, 5:] = IGNORE_TARGET
    with_loss, without = decoder(router_z_loss=0.5, balance_loss=0.0), decoder(router_z_loss=0.0, balance_loss=0.0)
    assert torch.equal(with_loss(ids, targets), without(ids, targets))
    assert torch.equal(with_loss.eval()(ids, targets), without.eval()(ids, targets))
    found, plain = gradients(with_loss.train(), ids, targets), gradients(without.train(), ids, targets)

    seen: list[torch.Tensor] = []
    for layer in without.mixtures():
        layer.register_forward_pre_hook(lambda layer, args: seen.append(layer.route(args[0].flatten(0, 1)).logits_NE))
    without.zero_grad()
    without(ids, targets)
    z = sum(summed_z_loss(logits[(targets != IGNORE_TARGET).flatten()]) for logits in seen)
    z_grads = torch.autograd.grad(0.5 * z, list(without.parameters()), allow_unused=True)
    for a, b, c in zip(found, plain, z_grads, strict=True):
        torch.testing.assert_close(a, b if c is None else b + c, rtol=1e-4, atol=1e-5)
    assert any(c is not None and c.abs().max() > 1e-3 for c in z_grads)


def test_uneven_micro_batches_do_not_change_the_mean() -> None:
    """Padding and how rows are cut: the z-loss's gradient is a sum over counted tokens in any case."""
    model = decoder(**SIGMOID, router_z_loss=0.3)
    ids, targets = batch(4)
    targets[1, 3:] = targets[3, 9:] = IGNORE_TARGET
    whole, counts = gradients(model, ids, targets), model.take_counts()
    parts = [gradients(model, ids[rows], targets[rows]) for rows in (slice(0, 1), slice(1, 4))]
    for a, *b in zip(whole, *parts, strict=True):
        torch.testing.assert_close(a, sum(b), rtol=1e-4, atol=1e-5)
    again = model.take_counts()
    assert counts is not None and again is not None
    experts = MIXTURE["experts"]
    assert torch.equal(counts[:, : experts + 1], again[:, : experts + 1])
    assert counts[:, experts].tolist() == [int((targets != IGNORE_TARGET).sum())] * 2
    assert counts[:, :experts].sum(1).tolist() == [2 * int((targets != IGNORE_TARGET).sum())] * 2


@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_pass_is_counted_once(mode: Any) -> None:
    model = decoder(**SIGMOID)
    model.set_activation_checkpointing(mode)
    ids, targets = batch(2)
    with torch.no_grad():
        model(ids, targets)
    model.eval()(ids, targets)
    assert not take_counts(model.train().mixtures(), 5).any()
    before = model.mixtures()[0].bias_E.clone()  # type: ignore[union-attr]
    gradients(model, ids, targets)
    assert torch.equal(before, model.mixtures()[0].bias_E)  # type: ignore[arg-type]
    counts = take_counts(model.mixtures(), 5)
    assert counts[:, 5].tolist() == [32, 32]
    assert not take_counts(model.mixtures(), 5).any()


def test_after_a_step_biases_move_against_the_load_and_metrics_tell() -> None:
    layers = [mixture(router_score="sigmoid", balance_bias_rate=0.25) for _ in range(2)]
    for layer in layers:
        layer.bias_E.zero_()  # type: ignore[union-attr]
    unit = 2**20
    counts = torch.tensor([[6, 4, 2, 4, 4, 10, 30 * unit, 11 * unit], [4, 4, 4, 4, 4, 10, 10 * unit, 10 * unit]])
    metrics = after_step(layers, counts, updated=True, experts_per_token=2)
    assert layers[0].bias_E.tolist() == [-0.25, 0.0, 0.25, 0.0, 0.0]  # type: ignore[union-attr]
    assert layers[1].bias_E.tolist() == [0.0] * 5  # type: ignore[union-attr]
    assert metrics == {
        "train/router_z_loss": 2.0,
        "train/router_balance_loss": 1.05,
        "train/expert_load_max": 1.5,
        "train/dropped_share": 0.0,
    }
    assert after_step(layers, counts, updated=False, experts_per_token=2) == {}
    assert after_step(layers, torch.zeros_like(counts), updated=True, experts_per_token=2) == {}
    assert layers[0].bias_E.tolist() == [-0.25, 0.0, 0.25, 0.0, 0.0]  # type: ignore[union-attr]
    counts[0, 0] -= 3
    assert after_step(layers, counts, updated=True, experts_per_token=2)["train/dropped_share"] == pytest.approx(3 / 40)


def load_after_learning(**balance: Any) -> float:
    """Largest load over mean load, at the end of a training whose router prefers two experts at its start."""
    model = decoder(layers=1, **balance)
    with torch.no_grad():
        model.embedding.weight.add_(0.3)
        model.mixtures()[0].router.weight[:2].add_(0.15)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, loads = [], []
    for step in range(40):
        tokens = (torch.arange(step * 7 % 48, step * 7 % 48 + 16)[:, None] + 3 * torch.arange(17)) % 64
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        for p in model.parameters():
            p.grad.div_(256)  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        counts = model.take_counts()
        assert counts is not None
        losses.append(loss.item())
        loads.append(model.after_step(counts, updated=True)["train/expert_load_max"])
    assert losses[-1] < 0.2 * losses[0] and min(loads[:5]) > 2.0
    return sum(loads[-5:]) / 5


@pytest.mark.parametrize(
    ("score", "balance"), [("sigmoid", {"balance_bias_rate": 0.02}), ("softmax", {"balance_loss": 0.1})]
)
def test_balance_brings_loads_together_while_a_model_learns(score: str, balance: dict[str, float]) -> None:
    without = load_after_learning(router_score=score, balance_bias_rate=0.0, balance_loss=0.0)
    assert load_after_learning(router_score=score, **balance) < 0.8 * without


def test_bf16_autocast_and_bf16_weights_work() -> None:
    ids, targets = batch(2)
    model = decoder(**SIGMOID)
    exact = model(ids, targets).item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, targets)
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    assert loss.item() == pytest.approx(exact, rel=0.02)
    assert model.bfloat16()(ids, targets).item() == pytest.approx(exact, rel=0.05)


def test_a_cache_gives_the_same_logits() -> None:
    model = decoder(**SIGMOID).eval()
    ids, _ = batch(2)
    cache = model.new_cache(2, 16)
    with torch.no_grad():
        whole = model(ids)
        steps = torch.cat([model(ids[:, i : i + 1], cache=cache) for i in range(16)], dim=1)
    torch.testing.assert_close(whole, steps, rtol=1e-4, atol=1e-5)


def test_the_first_layers_stay_dense_and_first_weights_are_sound() -> None:
    model = decoder(**SIGMOID, dense_layers=1, init_std=0.02)
    assert len(model.mixtures()) == 1 and not isinstance(model.layers[0].feed_forward, MixtureOfExperts)
    layer = model.mixtures()[0]
    assert layer.bias_E is not None and not layer.bias_E.any()
    assert layer.experts.gate_up.std().item() == pytest.approx(0.02, rel=0.1)
    for down in (layer.experts.down, layer.shared.down.weight):  # type: ignore[union-attr]
        assert down.std().item() == pytest.approx(0.02 / 2, rel=0.1)


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    layer = mixture(router_score="sigmoid")
    layer.bias_E.copy_(torch.tensor([0.0, 0.0, 0.0, 10.0, 10.0]))  # type: ignore[union-attr]
    layer(torch.randn(1, 4, 24)).sum().backward()
    assert layer.experts.down.grad is not None and not layer.experts.down.grad[:3].any()
    assert layer.experts.down.grad[3:].any()


@pytest.mark.slow
def test_compiled_it_computes_the_same() -> None:
    model, (ids, targets) = decoder(**SIGMOID), batch(2)
    expected, loss = gradients(model, ids, targets), model(ids, targets)
    model.compile(backend="eager")
    torch.testing.assert_close(model(ids, targets), loss)
    for a, b in zip(gradients(model, ids, targets), expected, strict=True):
        torch.testing.assert_close(a, b)
