"""What is known of fused matrices in transformers' models, by what their projections do in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway.config import ModelConfig
from headway.core.types import Fusion
from headway.models.hub import fusions
from headway.models.hub.transformers_model import TransformersModel
from support.families import VOCAB, family_config

transformers = pytest.importorskip("transformers")

_SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_MAMBA_1 = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "expand": 2}
_FALCON = {**_SIZES, "alibi": False, "parallel_attn": True, "attention_dropout": 0.0, "hidden_dropout": 0.0}
_BLOOM = {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}
_BIGCODE = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_LATER: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon": ("FalconConfig", {**_FALCON, "multi_query": True, "new_decoder_architecture": False}),
    "falcon-by-head": ("FalconConfig", {**_FALCON, "multi_query": False, "new_decoder_architecture": False}),
    "falcon-new": ("FalconConfig", {**_FALCON, "num_kv_heads": 2, "new_decoder_architecture": True}),
    "bloom": ("BloomConfig", _BLOOM),
    "bigcode": ("GPTBigCodeConfig", {**_BIGCODE, "multi_query": True}),
    "bigcode-by-head": ("GPTBigCodeConfig", {**_BIGCODE, "multi_query": False}),
    "mpt": ("MptConfig", {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}),
    "persimmon": ("PersimmonConfig", {**_SIZES, "intermediate_size": 64, "qk_layernorm": False}),
    "glm": ("GlmConfig", {**_SIZES, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}),
    "mamba": ("MambaConfig", _MAMBA_1),
    "falcon-mamba": ("FalconMambaConfig", _MAMBA_1),
    "lfm-2": (
        "Lfm2Config",
        {**_SIZES, "num_key_value_heads": 2, "intermediate_size": 48, "layer_types": ["conv", "full_attention"]},
    ),
}

Q, K, V = 0, 1, 2
#: Name -> layers in a module: the fused one, the one that its product ends in, projections without which that is zero,
#: and pairs of projections of which it does not matter which one is missing.
CASES: dict[str, list[tuple[str, str, tuple[int, ...], tuple[int, ...]]]] = {
    "phi-3": [("qkv_proj", "o_proj", (V,), (Q, K)), ("gate_up_proj", "down_proj", (0, 1), ())],
    "gpt-2": [("c_attn", "c_proj", (V,), (Q, K))],
    "gpt-neox": [("query_key_value", "dense", (V,), (Q, K))],
    "falcon": [("query_key_value", "dense", (V,), (Q, K))],
    "falcon-by-head": [("query_key_value", "dense", (V,), (Q, K))],
    "falcon-new": [("query_key_value", "dense", (V,), (Q, K))],
    "bloom": [("query_key_value", "dense", (V,), (Q, K))],
    "bigcode": [("c_attn", "c_proj", (V,), (Q, K))],
    "bigcode-by-head": [("c_attn", "c_proj", (V,), (Q, K))],
    "mpt": [("Wqkv", "out_proj", (V,), (Q, K))],
    "persimmon": [("query_key_value", "dense", (V,), (Q, K))],
    "glm": [("gate_up_proj", "down_proj", (0, 1), ())],
    "mamba": [("in_proj", "out_proj", (0, 1), ())],
    "falcon-mamba": [("in_proj", "out_proj", (1,), ())],
    "nemotron-h": [("in_proj", "out_proj", (0,), ())],
    "mamba-2": [("in_proj", "out_proj", (0,), ())],
    "bamba": [("in_proj", "out_proj", (0,), ())],
    "falcon-h1": [("in_proj", "out_proj", (0,), ())],
    "qwen3-next": [("in_proj_qkvz", "out_proj", (V, 3), ())],
    "lfm-2": [("in_proj", "out_proj", (0, 1, 2), ())],
}


def build(name: str) -> TransformersModel:
    if name in _LATER:
        kind, keys = _LATER[name]
        made = getattr(transformers, kind)(**keys, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    else:
        made = family_config(name)
    made._attn_implementation = "eager"
    torch.manual_seed(0)
    network = transformers.AutoModelForCausalLM.from_config(made).eval()
    with torch.no_grad():
        for key, p in network.named_parameters():
            if p.ndim == 2:
                p.normal_(0.0, 0.3)
            elif key.endswith("bias") and "dt_bias" not in key:
                p.zero_()
    return TransformersModel(ModelConfig(from_pretrained="tiny"), network)


def view(p: torch.Tensor, fusion: Fusion, number: int) -> torch.Tensor:
    """The rows of a projection, by the words of `Fusion`."""
    rows = p.detach().T if fusion.by_columns else p.detach()
    grouped = rows.unflatten(0, (fusion.groups, sum(fusion.sizes)))
    start = sum(fusion.sizes[:number])
    return grouped[:, start : start + fusion.sizes[number]]


@pytest.mark.parametrize("name", CASES)
def test_a_projection_does_what_its_place_says(name: str) -> None:
    model = build(name)
    known = model.fusions()
    ids = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))

    def logits_without(layer: str, ends: str, numbers: tuple[int, ...]) -> torch.Tensor:
        """Logits where some projections of all layers with this name are zero; the last layer's where none is given."""
        kept = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        for module in model.modules():
            fused = getattr(module, layer, None)
            if not isinstance(fused, nn.Module) or fused.weight not in known:
                continue
            if not numbers:
                getattr(module, ends).weight.data.zero_()
            for number in numbers:
                view(fused.weight, known[fused.weight], number).zero_()
        with torch.no_grad():
            found: torch.Tensor = model(ids)
        model.load_state_dict(kept)
        return found

    with torch.no_grad():
        whole = model(ids)
    for layer, ends, silent, pair in CASES[name]:
        nothing = logits_without(layer, ends, ())
        assert not torch.allclose(whole, nothing, atol=1e-2)
        for number in silent:
            torch.testing.assert_close(logits_without(layer, ends, (number,)), nothing, msg=f"{layer}, {number}")
        if pair:
            first, second = (logits_without(layer, ends, (number,)) for number in pair)
            torch.testing.assert_close(first, second)
            assert not torch.allclose(first, whole, atol=1e-2) and not torch.allclose(first, nothing, atol=1e-2)


def test_the_second_matrix_of_an_adapter_has_the_rows_of_its_layer() -> None:
    peft = pytest.importorskip("peft")
    model = build("gpt-2")
    network = peft.get_peft_model(model.network, peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    found = dict(fusions.find_fusions(network))
    adapters = {p: fusion for p, fusion in found.items() if p.requires_grad}
    assert len(adapters) == 2 and {tuple(p.shape) for p in adapters} == {(96, 4)}
    assert set(adapters.values()) == {Fusion((32, 32, 32))}
    matrices = {fusion for p, fusion in found.items() if not p.requires_grad and p.ndim == 2}
    assert matrices == {Fusion((32, 32, 32), by_columns=True)}


def test_a_variant_of_unknown_sizes_stays_one_matrix() -> None:
    model = build("phi-3")
    attention = next(module for module in model.modules() if type(module).__name__ == "Phi3Attention")
    attention.qkv_proj = nn.Linear(32, 80)
    assert attention.qkv_proj.weight not in model.fusions()


def test_every_class_is_one_of_transformers() -> None:
    """A name that transformers has changed would silently match nothing."""
    source = "".join(
        path.read_text(encoding="utf-8") for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    )
    assert not [name for name in fusions._RULES if not re.search(rf"^class {name}\(", source, re.M)]
