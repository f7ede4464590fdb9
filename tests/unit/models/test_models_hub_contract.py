"""What a model of transformers declares, and the load-balancing loss of its routers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.config import Config
from headway.core.errors import ConfigError
from headway.models.build import complete
from headway.models.conformance import check_model
from headway.models.hub.frozen import freeze_as_configured
from headway.models.hub.quantized import QuantizedLinear
from headway.models.hub.router_loss import balance_loss
from headway.models.hub.transformers_build import build_transformers_model
from headway.models.hub.transformers_model import TransformersModel
from headway.training.optimizer import build_optimizer, set_learning_rate
from headway.training.setup.precision import autocast
from headway.training.task import language_model_loss
from support.families import VOCAB, write_family

pytest.importorskip("transformers")


def _model(source: Path, **keys: Any) -> TransformersModel:
    values = {"from_pretrained": str(source), "implementation": "transformers", **keys}
    return build_transformers_model(complete(Config.model_validate({"model": values}).model, 1), seed=0).train()


def _batch(rows: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {key: torch.randint(0, VOCAB, (rows, 8), generator=generator) for key in ("ids", "targets")}


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("qwen3", {}),
        ("nemotron-h", {}),
        (
            "llama-3",
            {"adapter": {"rank": 2, "dropout": 0.1, "also_trained": ["embed_tokens"], "also_trained_rate": 0.5}},
        ),
        ("mixtral", {"router_aux_weight": 0.1}),
    ],
)
def test_a_model_of_transformers_keeps_what_it_declares(family: str, keys: dict[str, Any], tmp_path: Path) -> None:
    model = _model(write_family(family, tmp_path / "model"), **keys)
    model.loss_from_hidden = family != "mixtral"
    check_model(model, language_model_loss, _batch())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_adapter_computes_what_peft_computes_in_one_product(precision: str, tmp_path: Path) -> None:
    """Also its copy does, which has weights of its own, and the model without the adapter."""
    model = _model(write_family("qwen3", tmp_path / "model"), adapter={"rank": 2, "alpha": 6})
    for name, p in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(p, std=0.1)
    plain = copy.deepcopy(model)
    layers = [module for module in plain.modules() if "forward" in vars(module)]
    assert len(layers) == 7 * len(model.layers())
    for layer in layers:
        del layer.forward
    batch = _batch()
    with autocast(precision, torch.device("cpu")):
        with torch.profiler.profile() as ours:
            gradients = _gradients(model, batch, 2)
        with torch.profiler.profile() as theirs:
            expected = _gradients(plain, batch, 2)
        with model.network.disable_adapter(), torch.no_grad():
            without = model(batch["ids"])
            with plain.network.disable_adapter():
                assert torch.equal(without, plain(batch["ids"]))
    tolerance = 1e-4 if precision == "fp32" else 0.1
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=tolerance, atol=tolerance)
    calls = [{event.key: event.count for event in found.key_averages()} for found in (ours, theirs)]
    assert calls[0]["aten::addmm"] >= len(layers) and "aten::addmm" not in calls[1]
    copied = copy.deepcopy(model)
    with torch.no_grad():
        before = model(batch["ids"])
        for p in copied.parameters():
            if p.requires_grad:
                p.zero_()
        assert torch.equal(copied(batch["ids"]), copied.network.base_model.model(batch["ids"]).logits)
        assert torch.equal(model(batch["ids"]), before) and not torch.allclose(copied(batch["ids"]), before)


def _gradients(model: TransformersModel, batch: dict[str, torch.Tensor], at_once: int) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    for ids, targets in zip(batch["ids"].split(at_once), batch["targets"].split(at_once), strict=True):
        model(ids, targets).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("from_hidden", [True, False])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_the_balance_of_experts_does_not_depend_on_micro_batches(from_hidden: bool, mode: Any, tmp_path: Path) -> None:
    source, batch = write_family("mixtral", tmp_path / "model"), _batch(4)
    batch["targets"][1, 3:] = -100
    plain, balanced = _model(source), _model(source, router_aux_weight=10.0)
    for model in (plain, balanced):
        model.loss_from_hidden = from_hidden
        model.set_activation_checkpointing(mode)
    whole = _gradients(balanced, batch, 4)
    for name, gradient in _gradients(balanced, batch, 1).items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-4, atol=1e-4)
    name = next(name for name in whole if "gate.weight" in name)
    assert not torch.allclose(whole[name], _gradients(plain, batch, 4)[name], atol=1e-3)
    assert balanced(batch["ids"], batch["targets"]) == plain(batch["ids"], batch["targets"])


def test_the_balance_of_a_row_is_that_of_transformers(tmp_path: Path) -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    model, batch = _model(write_family("mixtral", tmp_path / "model"), router_aux_weight=1.0), _batch(3)
    batch["targets"][0, 6:] = -100
    logits = model.backbone(batch["ids"], use_cache=False, output_router_logits=True).router_logits
    rows = [tuple(layer.view(3, 8, -1)[row] for layer in logits) for row in range(3)]
    expected = [load_balancing_loss_func(row, 4, 2) for row in rows]
    torch.testing.assert_close(
        balance_loss(logits, batch["targets"], 2), 6 * expected[0] + 8 * expected[1] + 8 * expected[2]
    )


def test_models_without_routers_refuse_a_weight_for_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no routers"):
        _model(write_family("qwen3", tmp_path / "qwen"), router_aux_weight=0.1)
    values = {"from_pretrained": str(write_family("mixtral", tmp_path / "mixtral")), "router_aux_weight": 0.1}
    with pytest.raises(ConfigError, match="losses of its own"):
        complete(Config.model_validate({"model": {**values, "implementation": "native"}}).model, 1)


def test_a_model_whose_layers_have_no_routers_says_so(tmp_path: Path) -> None:
    model, batch = _model(write_family("nemotron-h", tmp_path / "model"), router_aux_weight=0.1), _batch()
    with pytest.raises(ConfigError, match="has no routers"):  # its config has keys for them
        model(batch["ids"], batch["targets"])


def test_the_output_projection_below_an_adapter_is_not_quantized(tmp_path: Path) -> None:
    adapter = {"rank": 2, "targets": ["lm_head", "q_proj"], "frozen_precision": "int8"}
    model = _model(write_family("qwen3", tmp_path / "model"), adapter=adapter)
    freeze_as_configured(model, "fp32")
    quantized = {name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert any("q_proj" in name for name in quantized) and not any("lm_head" in name for name in quantized)


def test_noise_is_not_rounded_to_the_type_of_frozen_embeddings(tmp_path: Path) -> None:
    model = _model(write_family("qwen3", tmp_path / "model"), neftune_alpha=5.0, adapter={"rank": 2})
    embed, ids = model.causal.get_input_embeddings(), _batch()["ids"]
    embed.weight.data = embed.weight.data.bfloat16().float()
    torch.manual_seed(3)
    expected = embed(ids)
    freeze_as_configured(model, "bf16")
    assert embed.weight.dtype == torch.bfloat16
    torch.manual_seed(3)
    assert torch.equal(embed(ids), expected)


def test_noise_on_embeddings_is_uniform_repeats_and_is_for_training_only(tmp_path: Path) -> None:
    source, ids = write_family("qwen3", tmp_path / "model"), _batch()["ids"]
    plain, noisy = _model(source), _model(source, neftune_alpha=5.0)
    embed = plain.causal.get_input_embeddings()
    torch.manual_seed(3)
    noise = noisy.causal.get_input_embeddings()(ids) - embed(ids)
    largest = 5.0 / (8 * 32) ** 0.5  # alpha over the root of tokens times width
    assert 0.9 * largest < float(noise.abs().max()) <= largest * 1.001
    torch.manual_seed(3)
    torch.testing.assert_close(noisy.causal.get_input_embeddings()(ids) - embed(ids), noise, rtol=0, atol=0)
    assert torch.equal(noisy.eval()(ids), plain.eval()(ids))
    check_model(noisy.train(), language_model_loss, _batch())


def test_an_adapter_leaves_the_config_of_the_run_as_it_is(tmp_path: Path) -> None:
    """The run is resumed only with the config that it was made with."""
    adapter = {"rank": 2, "also_trained": ["embed_tokens"], "targets": ["q_proj"]}
    model = _model(write_family("qwen3", tmp_path / "model"), adapter=adapter)
    assert model.config.adapter is not None
    assert model.config.adapter.model_dump(include=adapter.keys()) == adapter


def test_modules_that_are_trained_beside_an_adapter_have_a_rate_of_their_own(tmp_path: Path) -> None:
    adapter = {"rank": 2, "also_trained": ["embed_tokens"], "also_trained_rate": 0.25}
    model = _model(write_family("llama-3", tmp_path / "model"), adapter=adapter)
    settings = Config.model_validate({"optimizer": {"weight_decay": 0.0, "eps": 1e-12}}).optimizer
    optimizer = build_optimizer(settings, model, torch.device("cpu"))
    set_learning_rate(optimizer, 0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    for name, p in model.named_parameters():
        if name in before:  # the first step of AdamW is as long as its rate
            rate = 0.1 if ".lora_" in name else 0.025
            torch.testing.assert_close(before[name] - p.detach(), torch.full_like(p, rate), rtol=1e-3, atol=1e-5)
    assert {".lora_" in name for name in before} == {True, False}
