"""What the decoder saves for its backward pass, tensor by tensor, against the arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.config import Config, ModelConfig
from headway.lab.plan import activations
from headway.lab.plan.activations import FP8_TILE, Activations, masked_pairs
from headway.lab.plan.trace import trace_decoder
from headway.models.build import build_model
from headway.models.decoder import Decoder
from headway.models.layers.attention import PackedDocuments
from headway.models.loss import linear_cross_entropy
from headway.models.sharding.context import SharedPositions
from headway.training.setup.precision import _TILE, autocast, convert_to_fp8
from headway.training.setup.trial import LiveBytes

SHAPE: dict[str, Any] = {"dim": 64, "layers": 3, "heads": 4, "ffn_dim": 160, "vocab_size": 640}
ROWS, LENGTH = 2, 48


class Alone(SharedPositions):
    """One of several workers that share rows; the others' keys and values are as its own."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def gather(self, k_BTKH: torch.Tensor, v_BTKH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = torch.stack((k_BTKH, v_BTKH)).repeat(1, 1, self.size, 1, 1)
        return k, v


def saved_bytes(
    model: ModelConfig,
    precision: str,
    checkpointing: str,
    shared: SharedPositions | None = None,
    documents: PackedDocuments | None = None,
) -> int:
    """Storages that autograd keeps, each once, without weights, buffers, ids and what the loss keeps."""
    decoder = build_model(model, vocab_size=640, seed=0)
    decoder.shared = shared
    decoder.set_activation_checkpointing(checkpointing)  # type: ignore[arg-type]
    if precision == "fp8":
        convert_to_fp8(decoder, LENGTH)
    known = [*decoder.parameters(), *decoder.buffers()]
    seen = {tensor.untyped_storage().data_ptr(): 0 for tensor in known}
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype.is_floating_point:
            kept.append(tensor)
            seen.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        return tensor

    ids = torch.randint(640, (ROWS, LENGTH))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), autocast(precision, torch.device("cpu")):
        decoder.hidden_states(ids, documents=documents)
    return sum(seen.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"kv_heads": 2}, {"qk_norm": True}, {"head_dim": 8}, {"dropout": 0.1}, {"sliding_window": 16},
     {"sliding_window": LENGTH}, {"post_norms": True}, {"norm": "layernorm1p", "activation": "relu2"},
     {"qkv_bias": True, "output_bias": True, "ffn_bias": True}, {"rotary_fraction": 0.5},
     {"norm": "rmsnorm1p", "activation": "geglu", "post_norms": True},
     {"embedding_scale": 3.0, "residual_scale": 0.5, "attention_scale": 0.1, "logit_divisor": 2.0}],
)  # fmt: skip
def test_a_layer_saves_what_is_planned(precision: str, changes: dict[str, Any]) -> None:
    model = ModelConfig(**{**SHAPE, **changes})
    run = Config.model_validate({"train": {"steps": 1, "sequence_length": LENGTH}})
    sizes = Activations.of(model, ROWS, LENGTH, precision, "cpu", masked_pairs=masked_pairs(run, model, 1))
    expected = model.layers * (sizes.dense.saved + sizes.dense.casts) + sizes.last_norm  # type: ignore[operator]
    assert saved_bytes(model, precision, "none") == expected


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "changes", [{}, {"kv_heads": 2}, {"qk_norm": True}, {"sliding_window": 4}, {"sliding_window": LENGTH}]
)
@pytest.mark.parametrize("documents", [False, True])
def test_a_layer_of_shared_rows_saves_what_is_planned(precision: str, changes: dict[str, Any], documents: bool) -> None:
    """The second of three workers; every run of its queries has a mask."""
    model, workers = ModelConfig(**{**SHAPE, **changes}), 3
    settings = {"train": {"steps": 1, "sequence_length": LENGTH}, "data": {"document_mask": documents}}
    pairs = masked_pairs(Config.model_validate(settings), model, workers, ROWS)
    assert pairs == 8 * (16 + 40) * (ROWS if documents else 1)  # runs of 8 up to positions 16 and 40
    length = LENGTH // workers
    sizes = Activations.of(model, ROWS, length, precision, "cpu", masked_pairs=pairs, context=workers)
    expected = model.layers * (sizes.dense.saved + sizes.dense.casts) + sizes.last_norm  # type: ignore[operator]
    packed = PackedDocuments.of(torch.zeros(ROWS, LENGTH, dtype=torch.int32)) if documents else None
    tables = 2 * ROWS * length * 16 * 4 if documents else 2 * length * 16 * 4  # cut for this worker, so no buffers
    assert saved_bytes(model, precision, "none", Alone(1, workers), packed) == expected + tables


def test_long_shared_rows_have_masks_and_repeated_heads_in_the_plan() -> None:
    """By hand: 8 workers, parts of 8192 positions; the last of the first half has runs that end at 8 and 9 parts."""
    model = ModelConfig(**{**SHAPE, "kv_heads": 2})
    run = Config.model_validate({"train": {"steps": 1, "sequence_length": 131072}})
    pairs = masked_pairs(run, model, 8)
    assert pairs == 8192 * 8192 * (8 + 9)
    without, with_masks = (
        Activations.of(model, 1, 16384, "bf16", "cuda", masked_pairs=n, context=8).dense.saved for n in (0, pairs)
    )
    keys = 2 * 131072 * 2 * 16
    repeated = 2 * 8192 * (8 + 9) * 4 * 16
    assert with_masks - without == 2 * (pairs + repeated - keys)


EXPERTS = {"experts": 6, "experts_per_token": 2, "expert_ffn_dim": 48, "dense_layers": 1}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("changes", [{}, {"shared_experts": 2}, {"router_score": "sigmoid"}])
def test_a_layer_with_experts_saves_what_is_planned(precision: str, changes: dict[str, Any]) -> None:
    model = ModelConfig(**{**SHAPE, **EXPERTS, **changes})
    sizes = Activations.of(model, ROWS, LENGTH, precision, "cpu")
    mixtures = 2 * (sizes.mixture.saved + sizes.mixture.casts)
    expected = sizes.dense.saved + sizes.dense.casts + mixtures + sizes.last_norm
    assert abs(saved_bytes(model, precision, "none") - expected) < 0.01 * mixtures


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("changes", [{}, {"shared_experts": 1}, {"experts": 5, "experts_per_token": 5}])
def test_selective_checkpointing_keeps_of_experts_what_is_planned(precision: str, changes: dict[str, Any]) -> None:
    """All experts have all tokens, so that it does not matter whose are kept."""
    model = ModelConfig(**{**SHAPE, **EXPERTS, "experts_per_token": 6, **changes})
    decoder = build_model(model, vocab_size=640, seed=0)
    decoder.set_activation_checkpointing("selective")
    ids = torch.randint(640, (ROWS, LENGTH))
    with autocast(precision, torch.device("cpu")), LiveBytes() as live:
        output = decoder.hidden_states(ids)
    sizes = Activations.of(model, ROWS, LENGTH, precision, "cpu")
    expected = sizes.dense.selected + 2 * sizes.mixture.selected + sizes.last_norm
    assert live.now - output.nbytes == expected


def test_a_kernel_for_all_experts_leaves_nothing_of_them() -> None:
    model = ModelConfig(**{**SHAPE, **EXPERTS})
    loop, grouped = (Activations.of(model, ROWS, LENGTH, p, "cuda").mixture.selected for p in ("fp16", "bf16"))
    pairs = ROWS * LENGTH * 2
    assert loop - grouped == 2 * pairs * (2 * 48 + 64) // 2


def test_8_bits_save_the_weights_themselves() -> None:
    pytest.importorskip("torchao")
    for changes in ({}, {"ffn_dim": 168}, {**EXPERTS, "shared_experts": 1}):  # 168 fills no tiles
        model = ModelConfig(**{**SHAPE, **changes})
        sizes = Activations.of(model, ROWS, LENGTH, "fp8", "cpu")
        mixtures = 2 if "experts" in changes else 0
        layers = (3 - mixtures) * (sizes.dense.saved + sizes.dense.casts)
        layers += mixtures * (sizes.mixture.saved + sizes.mixture.casts)
        assert abs(saved_bytes(model, "fp8", "none") - layers - sizes.last_norm) < 0.01 * layers, changes
    dense = ModelConfig(**SHAPE)
    assert Activations.of(dense, ROWS, LENGTH, "fp8", "cpu").dense.casts == 0
    assert Activations.of(dense, ROWS, LENGTH, "bf16", "cpu").dense.casts > 0
    assert FP8_TILE == _TILE


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_loss_has_the_logits_of_one_chunk_at_a_time(precision: str) -> None:
    element = 4 if precision == "fp32" else 2
    model = ModelConfig(**{**SHAPE, "dim": 16, "heads": 2, "vocab_size": 16384})  # 256 rows are 16 MiB of logits
    decoder = build_model(model, vocab_size=16384, seed=0)
    peaks = {}
    for rows in (256, 768):
        x, targets = torch.randn(rows, 16, requires_grad=True), torch.randint(16384, (rows,))
        with LiveBytes() as live, autocast(precision, torch.device("cpu")):
            linear_cross_entropy(x, decoder.projection, targets)
        peaks[rows] = live.peak
    # Two more chunks add their rows' gradients, and what is as small as the rows themselves.
    assert peaks[768] - peaks[256] < 8 * 512 * 16 * element < 2**20, peaks
    planned = {rows: Activations.of(model, 1, rows, precision, "cpu").loss_forward for rows in (256, 768)}
    for rows, peak in peaks.items():  # hidden states were there before
        assert abs(planned[rows] - 4 * rows * 16 - peak) < 0.05 * peak, (
            rows,
            planned,
            peaks,
        )


def test_a_gpu_keeps_less_of_norms_but_sums_of_attention_and_repeats_heads_in_fp32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grouped = ModelConfig(**{**SHAPE, "kv_heads": 2})
    stream, queries = ROWS * LENGTH * 64 * 4, ROWS * LENGTH * 64 * 4
    monkeypatch.setattr(activations, "has_bf16_tiles", lambda: False)
    cpu, gpu = (Activations.of(grouped, ROWS, LENGTH, "fp32", device).dense.saved for device in ("cpu", "cuda"))
    sums = ROWS * LENGTH * 4 * 4
    assert cpu - gpu == 2 * stream - 2 * queries - sums
    cpu, gpu = (Activations.of(grouped, ROWS, LENGTH, "bf16", device).dense.saved for device in ("cpu", "cuda"))
    assert cpu - gpu == 2 * stream - sums


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layers_of_a_pattern_save_what_a_run_without_values_finds(precision: str) -> None:
    changes: dict[str, Any] = {
        "layers": 4,
        "layer_pattern": "M*-M",
        "mamba": {"heads": 4, "head_dim": 16, "state_dim": 8, "groups": 2, "chunk": 16},
        "activation": "relu2",
        "rotary_fraction": 0.0,
    }
    model = ModelConfig(**{**SHAPE, **changes})
    with torch.device("meta"):
        decoder = Decoder(model)
    half = torch.bfloat16 if precision == "bf16" else None
    trace = trace_decoder(decoder, (ROWS, LENGTH), mode="none", half=half)
    assert trace.kept[0] == trace.kept[3] > 2 * max(trace.kept[1:3])
    # Small tensors that are in use anyway, such as masks, are counted in one and not in the other.
    assert sum(trace.kept) + trace.last_norm == pytest.approx(saved_bytes(model, precision, "none"), rel=0.001)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "changes",
    [
        {"attention_pattern": "SFS", "sliding_window": 16, "attention_softcap": 5.0, "kv_heads": 2},
        {"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_over": "projection"},
        {"attention_pattern": "FFN"},
    ],
)
def test_layers_that_the_table_does_not_have_are_found_by_a_run_without_values(
    precision: str, changes: dict[str, Any]
) -> None:
    model = ModelConfig(**{**SHAPE, **changes})
    with torch.device("meta"):
        decoder = Decoder(model)
    half = torch.bfloat16 if precision == "bf16" else None
    trace = trace_decoder(decoder, (ROWS, LENGTH), mode="none", half=half)
    assert sum(trace.kept) + trace.last_norm == pytest.approx(saved_bytes(model, precision, "none"), rel=0.03)
