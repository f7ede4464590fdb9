"""Low-rank adapters through peft."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headway.core.errors import ConfigError
from headway.core.random import derive_seed

if TYPE_CHECKING:
    from headway.config.pretrained import AdapterConfig


def add_adapter(network: Any, config: AdapterConfig, seed: int) -> Any:
    """Freeze a model of transformers and add adapters to its layers; return the model of peft around it.

    Raises:
        ConfigError: the model has no such layers, or peft is missing.
    """
    peft = _peft()
    trained_embeddings = {"embed_tokens", "lm_head", "embeddings", "wte"} & set(config.also_trained)
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=config.targets,
        modules_to_save=config.also_trained or None,
        use_rslora=config.method == "rslora",
        use_dora=config.method == "dora",
        ensure_weight_tying=bool(trained_embeddings) and bool(network.config.get_text_config().tie_word_embeddings),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "adapter"))
        try:
            return peft.get_peft_model(network, settings)
        except (ValueError, TypeError, NotImplementedError) as error:
            words = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"the model cannot have this adapter: {words}",
                where="model.adapter.targets, model.adapter.also_trained",
                fix="name linear layers of the model, or targets: all-linear",
            ) from error


def load_adapter(network: Any, folder: Path) -> Any:
    """Freeze a model of transformers and add the adapter of a folder, which is trained further.

    Raises:
        ConfigError: peft is missing.
    """
    return _peft().PeftModel.from_pretrained(network, folder, is_trainable=True, local_files_only=True)


def set_frozen_precision(network: nn.Module, dtype: torch.dtype) -> None:
    """Keep the matrices of frozen linear layers in a type, and embeddings if that loses no bit of them.

    In the type of the matrix products this changes no result, since autocast casts them at each use anyway. What an
    embedding returns is cast back to fp32, in which activations are summed up. Norms stay in fp32.
    """
    for module in network.modules():
        if not isinstance(module, nn.Linear | nn.Embedding) or module.weight.requires_grad:
            continue
        whole, rounded = module.weight.data, module.weight.data.to(dtype)
        if isinstance(module, nn.Linear) or whole.dtype == dtype or torch.equal(rounded.to(whole.dtype), whole):
            module.weight.data = rounded
            if isinstance(module, nn.Embedding) and dtype != torch.float32:
                module.register_forward_hook(lambda _, inputs, output: output.float())


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ConfigError(
            "adapters need the package peft", where="model.adapter", fix="pip install headway[peft]"
        ) from None
    return peft
