"""Low-rank adapters through peft."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headway.core.errors import ConfigError
from headway.core.random import derive_seed
from headway.core.requirements import install_command

if TYPE_CHECKING:
    from headway.config.sections.pretrained import AdapterConfig


def add_adapter(network: Any, config: AdapterConfig, seed: int) -> Any:
    """Freeze a model of transformers and add adapters to its layers; return the model of peft around it.

    Raises:
        ConfigError: the model has no such layers, or peft is missing.
    """
    peft = _peft()
    trained_embeddings = {"embed_tokens", "lm_head", "embeddings", "wte"} & set(config.also_trained)
    # peft adds the names of tied modules to the list that it gets, and those of the config belong to the run.
    also_trained = [*config.also_trained]
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=config.targets,
        modules_to_save=also_trained or None,
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


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        fix = install_command("peft")
        raise ConfigError("adapters need the package peft", where="model.adapter", fix=fix) from None
    return peft
