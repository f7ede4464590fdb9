"""The choice between the native decoder and transformers for a pretrained model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from headway.core.errors import ConfigError
from headway.models.hub.folder import is_adapter, open_folder
from headway.models.huggingface import read_model_config

if TYPE_CHECKING:
    from headway.config import ModelConfig


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
    try:
        read_model_config(folder)
    except ConfigError:
        if config.implementation == "native" or not (folder / "config.json").is_file():
            raise
        return "transformers"
    return "native" if config.adapter is None else "transformers"
