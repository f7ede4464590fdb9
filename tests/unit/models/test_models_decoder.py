from __future__ import annotations

import copy
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from headway.config import ModelConfig
from headway.core.errors import ConfigError
from headway.core.types import IGNORE_TARGET
from headway.models.build import build_model
from headway.models.decoder import Decoder
from headway.models.layers import attention
from headway.models.layers import layer as layer_module
from headway.models.layers.attention import attention_mask, kernels_share_heads
from headway.models.layers.layer import FeedForward
from headway.models.shape import Shape

VOCAB = 128


def small(**changes: Any) -> ModelConfig:
    keys = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 64, "max_sequence_length": 64, **changes}
    return ModelConfig(**keys)


def model_of(seed: int = 0, **changes: Any) -> Decoder:
    return build_model(small(init_std=0.1, **changes), vocab_size=VOCAB, seed=seed)


def ids_of(rows: int = 2, length: int = 24, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


VARIANTS: list[dict[str, Any]] = [
    {},
    {"tie_embeddings": True},
    {"kv_heads": 4},
    {"kv_heads": 1, "head_dim": 12},
    {"qk_norm": True},
    {"sliding_window": 5},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_loss_is_the_sum_over_targets(variant: dict[str, Any]) -> None:
    model, ids = model_of(**variant), ids_of()
    targets = ids_of(seed=1)
    targets[0, :5] = IGNORE_TARGET
    loss = model(ids, targets)
    logits = model(ids)
    assert logits.shape == (2, 24, VOCAB) and loss.dtype == torch.float32 and loss.shape == ()
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_token_does_not_see_the_future(variant: dict[str, Any]) -> None:
    model, ids = model_of(**variant), ids_of()
    changed = ids.clone()
    changed[:, 10] = (changed[:, 10] + 1) % VOCAB
    with torch.no_grad():
        before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10], after[:, 10])


def test_sliding_window_hides_the_past() -> None:
    """With one layer, a token further back than the window does not matter; with full attention it does."""
    ids = ids_of()
    changed = ids.clone()
    changed[:, 3] = (changed[:, 3] + 1) % VOCAB
    with torch.no_grad():
        windowed, full = model_of(layers=1, sliding_window=4), model_of(layers=1)
        torch.testing.assert_close(windowed(ids)[:, 7:], windowed(changed)[:, 7:])
        assert not torch.allclose(windowed(ids)[:, 6], windowed(changed)[:, 6])
        assert not torch.allclose(full(ids)[:, 7:], full(changed)[:, 7:])


def test_masks_are_left_out_where_they_are_not_needed() -> None:
    cpu = torch.device("cpu")
    assert attention_mask(0, 8, None, cpu) == (None, True)
    assert attention_mask(0, 8, 8, cpu) == (None, True)
    assert attention_mask(5, 1, None, cpu) == (None, False)
    mask, is_causal = attention_mask(2, 2, 3, cpu)
    assert mask is not None and not is_causal
    assert mask.tolist() == [[True, True, True, False], [False, True, True, True]]


OF_KINDS: dict[str, Any] = {
    "attention_pattern": "SF",
    "sliding_window": 5,
    "local_rope_theta": 50.0,
    "attention_softcap": 5.0,
    "logit_softcap": 4.0,
}


@pytest.mark.parametrize("variant", [*VARIANTS, OF_KINDS, {"attention_pattern": "NF"}], ids=str)
@pytest.mark.parametrize("pieces", [[24], [1] * 24, [10, 1, 13], [3, 7, 14]], ids=str)
def test_logits_with_cache_equal_those_without(variant: dict[str, Any], pieces: list[int]) -> None:
    model, ids = model_of(**variant).eval(), ids_of()
    with torch.no_grad():
        expected = model(ids)
        cache = model.new_cache(2, 24)
        logits = torch.cat([model(piece, cache=cache) for piece in ids.split(pieces, dim=1)], dim=1)
    assert cache.length == 24
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_repeated_heads_give_the_same(variant: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the kernel at hand may not share key-value heads."""
    model, ids, targets = model_of(**variant), ids_of(), ids_of(seed=1)
    model(ids, targets).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    monkeypatch.setattr("headway.models.layers.attention.kernels_share_heads", lambda *_: False)
    model(ids, targets).backward()
    for gradient, p in zip(expected, model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("major", [7, 8])
def test_which_kernels_share_heads(major: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=major))
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert kernels_share_heads(cpu, torch.float32, masked=True)
    assert kernels_share_heads(gpu, torch.float16, masked=False) == (major == 8)
    assert not kernels_share_heads(gpu, torch.float32, masked=False)
    assert not kernels_share_heads(gpu, torch.bfloat16, masked=True)


def test_too_long_sequences_are_refused() -> None:
    model = model_of()
    with pytest.raises(ConfigError, match="limit is 64"):
        model(ids_of(length=65))
    cache = model.new_cache(1, 10)
    model(ids_of(1, 8), cache=cache)
    with pytest.raises(ConfigError, match="limit is 10"):
        model(ids_of(1, 3), cache=cache)
    assert cache.length == 8


def test_incomplete_config_is_refused() -> None:
    with pytest.raises(ConfigError, match="not complete"):
        Decoder(small())


def test_first_weights_are_a_function_of_seed_and_name() -> None:
    state = torch.get_rng_state()
    model = model_of(seed=3)
    assert torch.equal(torch.get_rng_state(), state), "building a model must not touch the global random state"
    torch.manual_seed(99)
    again, deeper, other = model_of(seed=3), model_of(seed=3, layers=3), model_of(seed=4)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
        if weight.ndim == 1:
            assert (weight == 1).all()
            continue
        assert not torch.equal(weight, other.state_dict()[name])
        if "output" not in name and "down" not in name:
            assert torch.equal(weight, deeper.state_dict()[name])
    layer = model.state_dict()
    assert layer["layers.0.feed_forward.gate_up_groups.weight"].std().item() == pytest.approx(0.1, rel=0.1)
    assert layer["layers.0.feed_forward.down.weight"].std().item() == pytest.approx(0.1 / 2, rel=0.1)


def test_tied_projection_is_one_parameter() -> None:
    model = model_of(tie_embeddings=True)
    assert "head.weight" not in model.state_dict()
    assert model.projection is model.embedding.weight
    assert "head.weight" in model_of().state_dict()


def test_rotary_tables_are_no_state() -> None:
    assert not {"cos", "sin"} & set(model_of().state_dict())


def test_activation_checkpointing_gives_the_same_bits() -> None:
    ids, targets = ids_of(), ids_of(seed=1)
    results = []
    for mode in ("none", "selective", "full", "offload"):
        model = model_of(dropout=0.2)
        model.set_activation_checkpointing(mode)  # type: ignore[arg-type]
        torch.manual_seed(5)
        loss = model(ids, targets)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(first, one) for first, *others in zip(*results, strict=True) for one in others)


def test_offload_keeps_the_inputs_of_layers_and_no_other_tensor_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    moved, asked = list[torch.Size](), list[bool]()

    def hooks(*inputs: Any) -> Any:
        asked.append(any(isinstance(value, torch.Tensor) for value in inputs))

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            moved.append(tensor.shape)
            return tensor.clone()  # as the copy in host memory

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    monkeypatch.setattr(layer_module, "in_host_memory", hooks)
    model = model_of(layers=3)
    model.set_activation_checkpointing("offload")
    model(ids_of(), ids_of(seed=1)).backward()
    assert asked == [True] * 3 and len(moved) == 3, "the weights and what is recomputed are not moved"
    assert set(moved) == {(*ids_of().shape, model.shape.dim)}


@pytest.mark.parametrize(
    ("tiles", "kernel"), [(False, "causal_attention"), (True, "_scaled_dot_product_flash_attention_for_cpu")]
)
def test_selective_checkpointing_computes_every_second_product_again_and_no_attention(
    tiles: bool, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_by_products", not tiles)

    class Called(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls[operator.overloadpacket.__name__] += 1
            return operator(*args, **(kwargs or {}))

    found, layers = {}, 2
    for mode in ("none", "selective", "full"):
        model = model_of(layers=layers)
        model.set_activation_checkpointing(mode)  # type: ignore[arg-type]
        loss, calls = model(ids_of(), ids_of(seed=1)), Counter[str]()
        with Called():
            loss.backward()
        found[mode] = calls
    assert [calls[kernel] for calls in found.values()] == [0, 0, layers]
    # The last product of a layer is needed by nothing in its backward pass, so of two that are not kept one is left.
    assert [calls["mm"] - found["none"]["mm"] for calls in found.values()] == [0, layers, 3 * layers]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param("selective", marks=pytest.mark.slow), "full"])
def test_activation_checkpointing_compiles(mode: Any) -> None:
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        model = model_of()
        model.set_activation_checkpointing(mode)
        if compiled:
            model.compile(backend="aot_eager")
        model(ids_of(), ids_of(seed=1)).backward()
        results.append([p.grad for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_activation_checkpointing_keeps_less() -> None:
    def saved_bytes(mode: str) -> int:
        model, total = model_of(), 0
        model.set_activation_checkpointing(mode)  # type: ignore[arg-type]

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.numel() * tensor.itemsize
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            model(ids_of(), ids_of(seed=1))
        return total

    assert saved_bytes("full") < saved_bytes("none") / 2


def test_dropout_only_in_training() -> None:
    model, ids = model_of(dropout=0.5), ids_of()
    with torch.no_grad():
        assert not torch.equal(model(ids), model(ids))
        model.eval()
        assert torch.equal(model(ids), model(ids))
        assert torch.equal(model(ids), model_of()(ids))


@pytest.mark.parametrize("pure", [False, True], ids=["autocast", "bf16 weights"])
def test_bf16(pure: bool) -> None:
    model, ids, targets = model_of(qk_norm=True), ids_of(), ids_of(seed=1)
    expected = model(ids, targets)
    expected.backward()
    expected_grad = model.layers[0].attention.qkv.weight.grad.clone()
    model.zero_grad()
    if pure:
        model.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=not pure):
        loss = model(ids, targets)
        assert model(ids).dtype == torch.bfloat16
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=0.02)
    grad = model.layers[0].attention.qkv.weight.grad
    assert F.cosine_similarity(grad.float().flatten(), expected_grad.flatten(), dim=0) > 0.99


def test_gradients_add_up_over_micro_batches() -> None:
    """The loss is a sum, so two halves of a batch give the gradient of the whole."""
    model, ids, targets = model_of(), ids_of(4), ids_of(4, seed=1)
    model(ids, targets).backward()
    whole = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    for half in (slice(0, 2), slice(2, 4)):
        model(ids[half], targets[half]).backward()
    for expected, p in zip(whole, model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_compiles_without_a_graph_break(precision: str) -> None:
    """Traced by dynamo and autograd; what inductor makes of the graph is its own matter, and slow to wait for."""
    torch._dynamo.reset()
    model, ids, targets = model_of(qk_norm=True), ids_of(), ids_of(seed=1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    gradients = []
    for each in (model, compiled):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = each(ids, targets)
        loss.backward()
        gradients.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        model.zero_grad()
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2 if precision == "bf16" else 1e-5, atol=1e-3)


def test_models_package_is_light() -> None:
    """Facts about shapes must not cost the import of torch: the command line prints them."""
    code = "import sys, headway.models.facts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_parts_of_a_feed_forward_layer_add_up_to_the_whole() -> None:
    """Rows of the first matrix and columns of the second, cut into equal parts, are smaller layers of the same kind."""
    config = ModelConfig(dim=8, layers=1, heads=2, ffn_dim=48, vocab_size=64)
    whole = FeedForward(config, Shape.of(config))
    x = torch.randn(2, 3, 8)
    for parts in (2, 4, 8, 16):
        total = torch.zeros_like(x)
        for rows, columns in zip(
            whole.gate_up_groups.weight.chunk(parts), whole.down.weight.chunk(parts, dim=1), strict=True
        ):
            part = copy.deepcopy(whole)
            part.gate_up_groups.weight, part.down.weight = nn.Parameter(rows), nn.Parameter(columns)
            total += part(x)
        torch.testing.assert_close(total, whole(x))


@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
def test_activations_in_bf16_loop_over_rows_without_gaps(activation: Any) -> None:
    """PyTorch's loops over shorter rows in 16 bits take one element at a time, which is eight times as slow."""

    class Called(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if operator.overloadpacket.__name__ in ("silu", "silu_backward", "gelu", "gelu_backward"):
                called.append(all(x.is_contiguous() for x in args if isinstance(x, torch.Tensor)))
            return operator(*args, **(kwargs or {}))

    config = ModelConfig(dim=32, layers=1, heads=2, ffn_dim=512, vocab_size=64, activation=activation)
    layer, x, called = FeedForward(config, Shape.of(config)), torch.randn(2, 3, 32), list[bool]()
    with torch.autocast("cpu", torch.bfloat16), Called():
        y = layer(x)
    with Called():
        y.sum().backward()
    assert called == [True, True]
    gate, up = layer.gate_up_groups.weight.bfloat16().view(16, 2, 32, 32).unbind(1)
    x = x.bfloat16()
    act = F.silu if activation == "swiglu" else lambda z: F.gelu(z, approximate="tanh")
    expected = (act(x @ gate.flatten(0, 1).t()) * (x @ up.flatten(0, 1).t())) @ layer.down.weight.bfloat16().t()
    torch.testing.assert_close(y, expected, rtol=0.02, atol=0.001)


def test_norms_of_heads_begin_with_a_gain_of_1() -> None:
    """With `layernorm1p` too: its norms of heads are RMSNorm, whose weight is the gain."""
    weights = {norm: model_of(norm=norm, qk_norm=True).state_dict() for norm in ("layernorm1p", "rmsnorm1p")}
    assert (weights["layernorm1p"]["layers.0.attention.q_norm.weight"] == 1).all()
    assert not weights["rmsnorm1p"]["layers.0.attention.q_norm.weight"].any()
