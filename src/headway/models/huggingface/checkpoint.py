"""Import of Hugging Face checkpoints (safetensors, `config.json`, tokenizer) without `transformers`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from headway.config import ModelConfig
from headway.core.errors import CheckpointError
from headway.core.files.atomic import write_json
from headway.core.files.foreign import LISTING_BYTES, open_regular, read_json_object
from headway.models.decoder import Decoder
from headway.models.finite import check_finite
from headway.models.huggingface.config import from_huggingface
from headway.models.huggingface.folder import check_is_there
from headway.models.huggingface.weights import (
    fuse_weights,
    is_left_out,
    layer_prefix,
    to_huggingface_tensors,
    weight_names,
)
from headway.models.shape import Shape

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def read_model_config(folder: Path) -> ModelConfig:
    """Read the complete config of a Hugging Face checkpoint.

    Raises:
        ConfigError: there is no such folder, or the native decoder does not support its model.
        CheckpointError: `config.json` cannot be read.
    """
    check_is_there(folder)
    path = folder / "config.json"
    return from_huggingface(read_settings(path), str(path))


def import_model(folder: Path) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Read a Hugging Face checkpoint of the Llama family.

    Returns:
        The complete config, and the state dict of its `Decoder`: fp32, on the CPU.

    Raises:
        ConfigError: the native decoder does not support the model.
        CheckpointError: a file is missing or damaged, or its tensors do not match the config.
    """
    config, read = open_model(folder)
    return config, {name: read(name) for name in weight_names(config)}


def open_model(folder: Path) -> tuple[ModelConfig, Callable[[str], torch.Tensor]]:
    """Open a checkpoint as `import_model` does, and return its config and a function that reads one tensor by name.

    Raises:
        ConfigError, CheckpointError: as `import_model`.
    """
    config = read_model_config(folder)
    files = weight_files(folder)
    _check_tensors(config, folder, files)
    names = weight_names(config)

    def read(name: str) -> torch.Tensor:
        parts = [read_tensor(files[part], part).float() for part in names[name]]
        for part, tensor in zip(names[name], parts, strict=True):
            check_finite([(part, tensor)], files[part])
        return fuse_weights(name, parts, config)

    return config, read


def weight_files(folder: Path) -> dict[str, Path]:
    """Map each tensor name to the file that holds it."""
    # This file comes before an index, which may be left over from earlier content. transformers uses this order too.
    if (folder / WEIGHTS).is_file():
        return dict.fromkeys(_names_in(folder / WEIGHTS), folder / WEIGHTS)
    if (folder / INDEX).is_file():
        weight_map = read_settings(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or any(Path(str(file)).name != file for file in weight_map.values()):
            raise CheckpointError("the index of the weights is damaged", where=str(folder / INDEX), fix=_FETCH_AGAIN)
        return {name: folder / file for name, file in weight_map.items()}
    if any(folder.glob("pytorch_model*.bin")):
        raise CheckpointError(
            "the weights are pickled, and Headway never unpickles: that can run arbitrary code",
            where=str(folder),
            fix="if you trust them, convert them: AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW)",
        )
    raise CheckpointError("there are no weights", where=str(folder), fix=f"give a folder with {WEIGHTS} or {INDEX}")


_FETCH_AGAIN = "fetch the checkpoint again"


def _check_tensors(config: ModelConfig, folder: Path, files: dict[str, Path]) -> None:
    """Compare names, shapes and dtypes with the config before reading any tensor in full."""
    layers = Shape.of(config).layers
    last = layer_prefix(config, layers - 1)
    if not any(name.startswith(last) for name in files):  # first: the config may ask for too many layers to build
        raise CheckpointError(
            f"tensors are missing: {last}* of the {layers:,} layers in config.json",
            where=str(folder),
            fix=_FETCH_AGAIN,
        )
    with torch.device("meta"):
        state = Decoder(config).state_dict()
    expected = {name: tuple(tensor.shape) for name, tensor in to_huggingface_tensors(config, state)}
    if missing := sorted(expected.keys() - files.keys()):
        raise CheckpointError(f"tensors are missing: {_some(missing)}", where=str(folder), fix=_FETCH_AGAIN)
    extra = {name for name in files.keys() - expected.keys() if not is_left_out(config, name)}
    # Some tied checkpoints store the projection twice.
    if config.tie_embeddings and "lm_head.weight" in extra:
        extra.remove("lm_head.weight")
        head = read_tensor(files["lm_head.weight"], "lm_head.weight")
        (embedding,) = weight_names(config)["embedding.weight"]
        if not torch.equal(head, read_tensor(files[embedding], embedding)):
            raise CheckpointError(
                "config.json ties lm_head to the embedding, but the two are different",
                where=str(folder),
                fix="set tie_word_embeddings to false in config.json, if the weights are right",
            )
    if extra:
        raise CheckpointError(
            f"there are tensors that the architecture does not have: {_some(sorted(extra))}",
            where=str(folder),
            fix="give a checkpoint without adapters, biases or quantization",
        )
    for name, shape in expected.items():
        with _opened(files[name]) as file:
            found = file.get_slice(name)
            if tuple(found.get_shape()) != shape or found.get_dtype() not in ("F64", "F32", "F16", "BF16"):
                raise CheckpointError(
                    f"{name} is {found.get_dtype()} {found.get_shape()}; config.json asks for floats {list(shape)}",
                    where=str(files[name]),
                    fix="give a checkpoint whose config.json belongs to its weights, not a quantized one",
                )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        open_regular(path).close()
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise CheckpointError(f"the weights cannot be read: {reason}", where=str(path), fix=_FETCH_AGAIN) from error


def _names_in(path: Path) -> list[str]:
    with _opened(path) as file:
        return list(file.keys())


def stored_type(path: Path, name: str) -> str:
    """Return the type of a tensor in a file as safetensors names it, such as `BF16`."""
    with _opened(path) as file:
        return str(file.get_slice(name).get_dtype())


def read_tensor(path: Path, name: str) -> torch.Tensor:
    with _opened(path) as file:
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor


def read_settings(path: Path) -> dict[str, Any]:
    """Read a JSON object of a checkpoint.

    Raises:
        CheckpointError: it cannot be read, or is no JSON object.
    """
    try:
        return read_json_object(path, LISTING_BYTES)
    except OSError as error:
        what = f"the file cannot be read: {error.strerror or error}"
        raise CheckpointError(what, where=str(path), fix=_FETCH_AGAIN) from error
    except ValueError as error:
        raise CheckpointError(f"the file {error}", where=str(path), fix=_FETCH_AGAIN) from error


def copy_tokenizer(source: Path, folder: Path, max_sequence_length: int) -> None:
    """Copy the files of a tokenizer, and write the settings that transformers needs if there are none."""
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if not (folder / "tokenizer_config.json").exists():
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_sequence_length}
        write_json(folder / "tokenizer_config.json", settings, exact=True)
