"""Models of transformers, made from their folders: the config is read, the weights are loaded, an adapter is added."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headway.core.errors import CheckpointError, ConfigError, HeadwayError
from headway.core.files.foreign import LISTING_BYTES, read_json_object
from headway.core.requirements import install_command
from headway.models.finite import check_finite
from headway.models.hub.folder import base_folder, is_adapter, open_folder
from headway.models.hub.lora import add_adapter, load_adapter
from headway.models.hub.transformers_model import TransformersModel, no_routers
from headway.models.huggingface.folder import check_is_there
from headway.models.huggingface.largest import check_sizes

if TYPE_CHECKING:
    from headway.config import ModelConfig

#: `model.max_sequence_length` of a model that names no limit, such as one without attention.
UNLIMITED = 2**20


def read_config(config: ModelConfig) -> Any:
    """Read the config of a pretrained model by transformers.

    Raises:
        ConfigError: there is none, transformers does not know the model, or it comes with code that may not run.
    """
    assert config.from_pretrained is not None
    folder = base_folder(config.from_pretrained, with_code=config.trust_remote_code)
    check_is_there(folder)
    with explained(folder):
        found = load_transformers().AutoConfig.from_pretrained(
            folder, trust_remote_code=config.trust_remote_code, local_files_only=True
        )
    if getattr(found, "quantization_config", None) is not None:
        raise ConfigError(
            "the weights of the pretrained model are quantized, so they cannot be trained",
            where=str(folder / "config.json"),
            fix="give the model that was quantized; adapters keep it in model.adapter.frozen_precision",
        )
    return found


def attention_options(config: ModelConfig) -> dict[str, str]:
    """Return the argument by which transformers builds a model with the attention of a config."""
    if config.attention == "auto":
        return {}
    return {"attn_implementation": "flex_attention" if config.attention == "flex" else config.attention}


def complete_from_transformers(config: ModelConfig, found: Any) -> ModelConfig:
    """Fill in what the config of transformers says about the sizes that Headway needs."""
    text = found.get_text_config()
    routes = hasattr(found, "output_router_logits") and getattr(text, "num_experts_per_tok", None)
    if config.router_aux_weight and not routes:
        raise no_routers(found.model_type)
    longest = getattr(text, "max_position_embeddings", None)
    return config.model_copy(
        update={
            "implementation": "transformers",
            "vocab_size": text.vocab_size,
            "max_sequence_length": longest if isinstance(longest, int) and longest > 0 else UNLIMITED,
        }
    )


def build_transformers_model(config: ModelConfig, *, seed: int) -> TransformersModel:
    """Build a pretrained model with its weights in fp32 on the CPU, and its adapter with weights from the seed.

    Raises:
        ConfigError: transformers cannot build the model, or it cannot have the adapter.
        CheckpointError: its weights are damaged or do not match its config.
    """
    assert config.from_pretrained is not None
    read_config(config)
    folder = base_folder(config.from_pretrained, with_code=config.trust_remote_code)
    with explained(folder):
        network, report = load_transformers().AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            trust_remote_code=config.trust_remote_code,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            **attention_options(config),
        )
    _check_report(report, folder)
    check_finite(network.named_parameters(), folder)
    return with_adapter(config, network, seed)


def with_adapter(config: ModelConfig, network: Any, seed: int) -> TransformersModel:
    """Wrap a network of transformers, with the adapter of the pretrained folder or of the config if there is one."""
    assert config.from_pretrained is not None
    folder = open_folder(config.from_pretrained, with_code=config.trust_remote_code)
    if is_adapter(folder):
        if config.adapter is not None:
            raise ConfigError(
                "the pretrained model is an adapter already", where="model.adapter", fix="leave model.adapter out"
            )
        with explained(folder):
            network = load_adapter(network, folder)
        check_finite(network.named_parameters(), folder)
    elif config.adapter is not None:
        with quiet():
            network = add_adapter(network, config.adapter, seed)
    return TransformersModel(config, network)


def _check_report(report: dict[str, Any], folder: Path) -> None:
    """Check that every weight came from the folder, and none was left over."""
    for key, words in (("missing_keys", "are missing"), ("mismatched_keys", "have other sizes than config.json asks")):
        names = sorted(str(name) for name in report.get(key) or ())
        if names:
            raise CheckpointError(
                f"tensors {words}: {_some(names)}", where=str(folder), fix="fetch the checkpoint again"
            )
    unexpected = sorted(map(str, report.get("unexpected_keys") or ()))
    if unexpected:
        raise CheckpointError(
            f"there are tensors that the architecture does not have: {_some(unexpected)}",
            where=str(folder),
            fix="give a folder whose config.json belongs to its weights",
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def load_transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            "this model is computed by transformers, which is not installed",
            where="model.from_pretrained",
            fix=install_command("hf", "transformers"),
        ) from None
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return transformers


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what libraries report while they are imported and build models: kernels for other machines, and names
    that are about to change between them."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(before)


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn what transformers raises for a folder, which can be anything, into an error in three parts.

    Sizes in its config.json are bounded first, since transformers builds whatever they ask for. Warnings of the
    libraries that it loads, such as torchao's about kernels for other machines, are not shown.
    """
    with suppress(OSError, ValueError):  # reported by whoever reads it
        check_sizes(read_json_object(folder / "config.json", LISTING_BYTES), str(folder / "config.json"))
    try:
        with quiet():
            yield
    except HeadwayError:
        raise
    except Exception as error:
        words = " ".join(str(error).split())[:300]
        if "trust_remote_code" in str(error):
            raise ConfigError(
                "the pretrained model comes with code of its own, which does not run unless you ask for it",
                where=str(folder),
                fix="read its *.py files, then model.trust_remote_code=true; or take a model that transformers has",
            ) from error
        raise ConfigError(
            f"transformers cannot load the pretrained model: {words or type(error).__name__}",
            where=str(folder),
            fix="check that AutoModelForCausalLM.from_pretrained loads this folder; a newer transformers may know it",
        ) from error
