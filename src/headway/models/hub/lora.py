"""Low-rank adapters through peft."""

from __future__ import annotations

from collections.abc import Sequence, Set
from difflib import get_close_matches
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn

from headway.config.sections.pretrained import AdapterConfig
from headway.core.errors import ConfigError, in_one_line
from headway.core.random import derive_seed
from headway.core.requirements import install_command
from headway.core.startup.dtensors import is_dtensor

#: Types of models with Mamba layers whose output projection peft refuses to adapt.
_READ_BY_KERNELS = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")


def add_adapter(network: Any, config: AdapterConfig, seed: int) -> Any:
    """Freeze a model of transformers and add adapters to its layers; return the model of peft around it.

    Raises:
        ConfigError: the model has no such layers, or peft is missing.
    """
    peft = _peft()
    _check_also_trained(network, config.also_trained)
    trained_embeddings = {"embed_tokens", "lm_head", "embeddings", "wte"} & set(config.also_trained)
    # peft adds the names of tied modules to the list that it gets, and those of the config belong to the run.
    also_trained = [*config.also_trained]
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=config.targets,
        exclude_modules=_past_adapters(network) if config.targets == "all-linear" else None,
        modules_to_save=also_trained or None,
        use_rslora=config.method == "rslora",
        use_dora=config.method == "dora",
        ensure_weight_tying=bool(trained_embeddings) and bool(network.config.get_text_config().tie_word_embeddings),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "adapter"))
        try:
            adapted = peft.get_peft_model(network, settings)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise ConfigError(
                f"the model cannot have this adapter: {in_one_line(error)}",
                where="model.adapter.targets, model.adapter.also_trained",
                fix=f"targets: layers that can have one: {', '.join(_linear_names(network))}",
            ) from error
    _check_targets(adapted, config.targets)
    _add_in_products(adapted)
    return adapted


def _add_in_products(adapted: Any) -> None:
    """Let plain adapters add what they compute to their layer's output within their second product.

    peft computes y + (h B^T) * scale in three operations over matrices as large as y, and differentiates each of them.
    """
    from peft.tuners.lora import Linear

    for module in adapted.modules():
        is_plain = type(module) is Linear and len(module.lora_A) == 1 and not module.lora_variant
        if is_plain and all(second.bias is None for second in module.lora_B.values()):
            module.forward = MethodType(_forward, module)


def _forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute a linear layer with one adapter, (..., inputs) -> (..., outputs); see `_add_in_products`."""
    (name,) = self.lora_A
    first = self.lora_A[name]
    second = self.lora_B[name]
    is_cast = torch.is_autocast_enabled(x.device.type)
    is_plain = self.active_adapters == [name] and not (self.disable_adapters or self.merged or args or kwargs)
    # The second matrix is read below without a call of its module, which may gather or convert it.
    is_here = type(second) is nn.Linear and not second._forward_pre_hooks and not is_dtensor(second.weight)
    if torch.compiler.is_compiling() or not (is_plain and is_here and (is_cast or x.dtype == first.weight.dtype)):
        found: torch.Tensor = type(self).forward(self, x, *args, **kwargs)
        return found
    y = self.base_layer(x)
    h = first(self.lora_dropout[name](x))
    sums = torch.addmm(y.flatten(0, -2), h.flatten(0, -2), second.weight.t(), alpha=self.scaling[name])
    return sums.view(y.shape)


def _past_adapters(network: Any) -> list[str] | None:
    """Return the names of layers that get no adapter, since kernels read their weights and not what they return."""
    return ["out_proj"] if network.config.model_type in _READ_BY_KERNELS else None


def _linear_names(network: Any) -> list[str]:
    """Return the last names of the linear layers that can have an adapter, but for the output projection's."""
    head = network.get_output_embeddings()
    without = _past_adapters(network) or []
    modules = ((name.split(".")[-1], module) for name, module in network.named_modules() if ".lora_" not in name)
    found = {name for name, module in modules if isinstance(module, nn.Linear) and module is not head}
    return sorted(found.difference(without, ("base_layer",)))


def _check_also_trained(network: Any, names: Sequence[str]) -> None:
    """Check that the model has the modules that are trained in full; peft leaves out those that it does not find.

    Raises:
        ConfigError: it has not.
    """
    modules = [name for name, _ in network.named_modules() if name]
    for wanted in names:
        if not any(name.endswith(wanted) for name in modules):
            raise _unknown(wanted, "also_trained", {name.split(".")[-1] for name in modules} | {*modules})


def _check_targets(adapted: Any, targets: str | Sequence[str]) -> None:
    """Check that every name of a list of targets has found a layer; peft is content with one that does.

    Raises:
        ConfigError: one has not.
    """
    if isinstance(targets, str):
        return
    # peft may have renamed the targets to those of stacked experts; what is left of the list must be there.
    wanted = {*targets} & {*(next(iter(adapted.peft_config.values())).target_modules or ())}
    found = adapted.base_model.targeted_module_names
    for name in sorted(wanted):
        if not any(place == name or place.endswith(f".{name}") for place in found):
            raise _unknown(name, "targets", {place.split(".")[-1] for place in found} | {*_linear_names(adapted)})


def _unknown(name: str, key: str, known: Set[str]) -> ConfigError:
    near = get_close_matches(name, sorted(known), n=1)
    meant = f"did you mean {near[0]}?" if near else f"one of {', '.join(sorted(k for k in known if '.' not in k))}"
    return ConfigError(f"the model has no module {name}", where=f"model.adapter.{key}", fix=meant)


def load_adapter(network: Any, folder: Path) -> Any:
    """Freeze a model of transformers and add the adapter of a folder, which is trained further.

    Raises:
        ConfigError: peft is missing.
    """
    adapted = _peft().PeftModel.from_pretrained(network, folder, is_trainable=True, local_files_only=True)
    _add_in_products(adapted)
    return adapted


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        fix = install_command("peft")
        raise ConfigError("adapters need the package peft", where="model.adapter", fix=fix) from None
    return peft
