"""The choice between the native decoder and transformers for a pretrained model."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from headway.config import ModelConfig
from headway.core.errors import ConfigError
from headway.core.files.foreign import read_json_or_empty
from headway.models.hub.folder import is_adapter, open_folder
from headway.models.huggingface.checkpoint import read_model_config


def choose_implementation(config: ModelConfig) -> Literal["native", "transformers"]:
    """Return the code that computes a pretrained model.

    Raises:
        ConfigError: there is no config.json, or the native decoder is asked for and does not compute the model.
        CheckpointError: config.json cannot be read.
    """
    assert config.from_pretrained is not None
    if config.implementation == "transformers":
        return "transformers"
    folder = open_folder(config.from_pretrained, with_code=config.trust_remote_code)
    if is_adapter(folder) and config.implementation == "auto":
        return "transformers"
    if config.implementation == "auto" and config.trust_remote_code and _has_own_code(folder):
        return "transformers"
    try:
        read_model_config(folder)
    except ConfigError:
        if config.implementation == "native" or not (folder / "config.json").is_file():
            raise
        return "transformers"
    return "native" if config.adapter is None else "transformers"


def check_own_code(config: ModelConfig) -> None:
    """Check that a run which begins does not ask for the native decoder and for the code of the model's folder.

    Raises:
        ConfigError: it does.
    """
    if config.implementation != "native" or not config.trust_remote_code or config.from_pretrained is None:
        return
    if _has_own_code(open_folder(config.from_pretrained, with_code=True)):
        raise ConfigError(
            "the native decoder does not run the code that comes with the model (auto_map in its config.json)",
            where="model.implementation, model.trust_remote_code",
            fix="model.implementation=transformers; or model.trust_remote_code=false, to leave that code out",
        )


def _has_own_code(folder: Path) -> bool:
    """Return whether transformers would take the config or the model from code in the folder."""
    classes = read_json_or_empty(folder / "config.json").get("auto_map")
    return isinstance(classes, dict) and not {"AutoConfig", "AutoModelForCausalLM"}.isdisjoint(classes)
