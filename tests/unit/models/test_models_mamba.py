"""Mamba-2 layers: against the recurrence itself, and with documents that must not see each other's state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from headway.config import Config, ModelConfig
from headway.config.checks.contradictions import find_problems
from headway.config.sections.model import division_problems
from headway.config.sections.parallel import ParallelConfig
from headway.core.errors import ConfigError
from headway.models.build import build_model, complete
from headway.models.decoder import Decoder
from headway.models.facts import count_parameters, flops_per_token, kv_bytes_per_token, part_costs, scan_flops
from headway.models.huggingface.export import export_model
from headway.models.layers.attention import PackedDocuments
from headway.models.layers.mamba import causal_conv, running_sum, scan

SIZES: dict[str, Any] = {"heads": 4, "head_dim": 8, "state_dim": 6, "groups": 2, "chunk": 8}
SHAPE: dict[str, Any] = {
    "dim": 48,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "ffn_dim": 80,
    "vocab_size": 64,
    "layer_pattern": "M*-M",
    "mamba": SIZES,
    "activation": "relu2",
    "rotary_fraction": 0.0,
    "max_sequence_length": 64,
    "init_std": 0.2,
}
LENGTHS = (11, 3, 17, 9)


def _hybrid(**changes: Any) -> Decoder:
    return build_model(ModelConfig(**{**SHAPE, **changes}), vocab_size=64, seed=1)


def _ids(rows: int = 1, length: int = sum(LENGTHS), seed: int = 0) -> torch.Tensor:
    return torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(seed))


def _packed(rows: int = 1) -> PackedDocuments:
    """Documents whose numbers come again in a row."""
    numbers = torch.repeat_interleave(torch.tensor([0, 1, 0, 1]), torch.tensor(LENGTHS))
    return PackedDocuments.of(numbers.expand(rows, -1))


def _recurrence(
    x: torch.Tensor, log_decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor, documents: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute h_t = a_t h_{t-1} + b_t x_t and y_t = c_t h_t one position after the other."""
    heads = x.shape[2] // b.shape[2]
    h, outputs = torch.zeros(len(x), x.shape[2], b.shape[3], x.shape[3], dtype=x.dtype), []
    for t in range(x.shape[1]):
        if documents is not None and t:
            h = h * (documents[:, t] == documents[:, t - 1])[:, None, None, None]
        b_t, c_t = (v[:, t].repeat_interleave(heads, 1)[..., None] for v in (b, c))
        h = h * log_decay[:, t].exp()[..., None, None] + b_t * x[:, t][:, :, None]
        outputs.append((c_t * h).sum(2))
    return torch.stack(outputs, 1), h.unflatten(1, (b.shape[2], -1)).permute(0, 1, 3, 2, 4).flatten(3)


@pytest.mark.parametrize("chunk", [1, 4, 8, 64])
@pytest.mark.parametrize("packed", [False, True])
def test_chunks_compute_the_recurrence(chunk: int, packed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    draw = {"generator": generator, "dtype": torch.float64}
    x, log_decay = torch.randn(2, 23, 6, 5, **draw), -torch.rand(2, 23, 6, **draw)  # type: ignore[call-overload]
    b, c = (torch.randn(2, 23, 2, 4, **draw) for _ in range(2))  # type: ignore[call-overload]
    documents = (torch.rand(2, 23, generator=generator) < 0.2).cumsum(1) if packed else None
    found = scan(x, log_decay, b, c, chunk=chunk, documents_BT=documents)
    for mine, expected in zip(found, _recurrence(x, log_decay, b, c, documents), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-10)


def test_decays_of_the_past_do_not_blur_later_ones() -> None:
    """In a long row with strong decays their sum is large, and what is left of its fraction in fp32 is little."""
    generator = torch.Generator().manual_seed(0)
    x, b, c = torch.randn(1, 64, 2, 3, generator=generator), *torch.randn(2, 1, 64, 1, 4, generator=generator)
    log_decay = -torch.rand(1, 64, 2, generator=generator)
    log_decay[:, :8] = -1e6
    found, _ = scan(x, log_decay, b, c, chunk=8)
    expected, _ = _recurrence(*(part.double() for part in (x, log_decay, b, c)), None)
    torch.testing.assert_close(found[:, 8:], expected[:, 8:].float(), rtol=1e-4, atol=1e-4)


def test_sums_and_convolutions_are_those_of_pytorch() -> None:
    x, weight, bias = torch.randn(2, 13, 5), torch.randn(5, 1, 4), torch.randn(5)
    torch.testing.assert_close(running_sum(x), x.cumsum(-1))
    extended = torch.cat((torch.zeros(2, 3, 5), x), 1)
    expected = F.conv1d(extended.transpose(1, 2), weight, bias, groups=5).transpose(1, 2)
    torch.testing.assert_close(causal_conv(extended, weight, bias, None), expected)


def test_a_packed_row_is_its_documents_alone(tmp_path: Path) -> None:
    """With gradients; transformers carries states from one document into the next."""
    model = _hybrid().eval()
    ids, documents = _ids(2), _packed(2)
    targets = ids.roll(-1, 1)
    logits = model(ids, documents=documents)
    alone = torch.cat([model(part) for part in ids.split(LENGTHS, 1)], 1)
    torch.testing.assert_close(logits, alone, rtol=1e-5, atol=1e-5)
    model(ids, targets, documents=documents).backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    pairs = zip(ids.split(LENGTHS, 1), targets.split(LENGTHS, 1), strict=True)
    torch.stack([model(part, aims) for part, aims in pairs]).sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(packed[name], p.grad, rtol=1e-4, atol=1e-4)

    transformers = pytest.importorskip("transformers")
    export_model(model, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        leaking = theirs(ids, position_ids=documents.positions_BT, use_cache=False).logits
    assert (leaking - logits).abs().max() > 0.1


@pytest.mark.parametrize("packed", [False, True])
def test_two_backward_passes_have_equal_bits(packed: bool) -> None:
    model, ids = _hybrid(dropout=0.1), _ids(2)
    found = []
    for mode in ("none", "none", "full", "selective"):
        model.set_activation_checkpointing(mode)  # type: ignore[arg-type]
        model.zero_grad()
        torch.manual_seed(3)
        model(ids, ids.roll(-1, 1), documents=_packed(2) if packed else None).backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert all(torch.equal(one[name], found[0][name]) for one in found for name in found[0])
    assert found[0].keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("prompt", [1, 2, 17])
def test_generation_keeps_states(prompt: int) -> None:
    model, ids = _hybrid().eval(), _ids(2, 30)
    with torch.no_grad():
        expected, cache = model(ids), model.new_cache(2, 30)
        torch.testing.assert_close(model.next_logits(ids[:, :prompt], cache), expected[:, prompt - 1])
        for place in range(prompt, 30):
            found = model.next_logits(ids[:, place : place + 1], cache)
            torch.testing.assert_close(found, expected[:, place], rtol=1e-4, atol=1e-5)
    assert len(cache.keys) == 1 and len(cache.states) == 2  # a cache of keys for layers with attention only
    assert kv_bytes_per_token(model.config) == 2 * 2 * 12 * 2


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16 weights", "autocast"])
def test_half_precision_is_as_near_as_its_rounding(autocast: bool) -> None:
    model, ids = _hybrid().eval(), _ids()
    expected = model(ids)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = (model if autocast else model.bfloat16())(ids)
    assert found.dtype == torch.bfloat16
    assert 0 < (found.float() - expected).abs().max() < 0.2 * expected.abs().max()


def test_first_values_are_those_of_mamba() -> None:
    state = _hybrid().state_dict()
    torch.testing.assert_close(state["layers.0.mamba.log_decay"].exp(), torch.arange(1.0, 5.0))
    step = F.softplus(state["layers.3.mamba.step_bias"])
    assert 0.001 <= step.min() < step.max() <= 0.1
    assert bool((state["layers.0.mamba.skip"] == 1).all()) and not state["layers.0.mamba.conv_bias"].any()
    assert 0.2 < state["layers.0.mamba.conv_weight"].abs().max() <= 0.5


def test_costs_are_those_of_the_products() -> None:
    config = complete(ModelConfig(**{**SHAPE, "layer_pattern": "MM", "layers": 2, "tie_embeddings": True}), 64)
    model, length = Decoder(config), 32
    counts = count_parameters(config)
    assert counts.total == sum(p.numel() for p in model.parameters())
    with FlopCounterMode(display=False) as counter:
        model(_ids(1, length)).sum().backward()
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    expected = 6 * matrices + 2 * scan_flops(config, length)
    # Besides, the states of four chunks are passed on.
    assert expected < counter.get_total_flops() / length < 1.1 * expected
    hybrid = complete(ModelConfig(**SHAPE), 64)
    costs = part_costs(hybrid, length)
    norms = 6 * hybrid.dim  # type: ignore[operator]
    assert sum(costs.layers) + costs.head == flops_per_token(hybrid, length) - norms
    assert len(set(costs.layers)) == 3 and costs.layers[0] == costs.layers[3]


@pytest.mark.parametrize("key", ["tensor", "context"])
def test_what_a_state_does_not_allow_is_refused_before_the_start(key: str) -> None:
    config = Config.model_validate({"model": SHAPE, "train": {"steps": 1, "sequence_length": 64}})
    assert not list(division_problems(config.model, config.parallel))
    shared = config.model_copy(update={"parallel": ParallelConfig.model_validate({key: 2, "workers": 2})})
    assert any(
        "Mamba-2" in problem.what and problem.where.startswith(f"parallel.{key}") for problem in find_problems(shared)
    )
    with pytest.raises(ConfigError, match="Mamba-2"):
        _hybrid().tensor_plan(2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_pattern": "M*-"}, "has 3 layers, and model.layers is 4"),
        ({"mamba": None}, "set model.mamba"),
        ({"layer_pattern": None}, "no effect without layer_pattern"),
        ({"layer_pattern": "M*xM"}, "layer_pattern"),
        ({"mamba": {**SIZES, "groups": 3}}, "cannot be divided into 3 groups"),
        ({"sliding_window": 8}, "excludes sliding_window"),
        ({"rope_scaling": {"kind": "yarn", "factor": 2}, "rotary_fraction": 1.0}, "needs original_length"),
        ({"rope_scaling": {"kind": "linear", "factor": 2}}, "no effect without a rotary embedding"),
        ({"rotary_fraction": 0.25}, "turns 3 elements"),
    ],
    ids=str,
)
def test_patterns_that_make_no_model_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**SHAPE, **changes})
