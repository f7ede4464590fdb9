"""Export of the native decoder as a Hugging Face checkpoint, without `transformers`."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from headway.core.errors import CheckpointError, ConfigError
from headway.core.files.atomic import write_json
from headway.models.decoder import Decoder
from headway.models.huggingface.checkpoint import INDEX, WEIGHTS, copy_tokenizer, read_settings
from headway.models.huggingface.config import to_huggingface
from headway.models.huggingface.folder import check_not_foreign, mark, published
from headway.models.huggingface.weights import SELECTION_BIAS, to_huggingface_tensors
from headway.models.written import FolderProof, logits_as_stored

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def export_model(
    model: Decoder,
    folder: Path,
    tokenizer_folder: Path | None = None,
    *,
    dtype: Literal["fp32", "bf16"] = "fp32",
    max_shard_bytes: int = 5 * 10**9,
    tokenizer_json: bytes | None = None,
    stop_ids: Collection[int] = (),
) -> None:
    """Write a decoder as a Hugging Face checkpoint that transformers loads without further code.

    The folder is complete or absent: the export is written next to it and renamed into place. It replaces an earlier
    export, which survives under another name if the process is killed between the two renames.

    Args:
        model: On any device.
        folder: Output folder.
        tokenizer_folder: Contains `tokenizer.json`; its files are copied, and `config.json` gets its special tokens.
        dtype: Dtype of the stored weights.
        max_shard_bytes: Weights are split into files of at most this size (one tensor may be larger).
        tokenizer_json: Overrides the file in the tokenizer's folder.
        stop_ids: All tokens that end a text, if the tokenizer's end of text is not the only one.

    Raises:
        ConfigError: the folder holds anything but an earlier export or cannot be replaced, the tokenizer is missing, or
            no architecture of transformers computes this decoder.
        CheckpointError: the folder does not compute what the model computes.
        OSError: the export cannot be written.
    """
    folder = folder.resolve()  # keep a link in place, and give "." a name
    check_not_foreign(folder)
    special_ids = _special_ids(tokenizer_folder)
    config = to_huggingface(model.config, str(_DTYPES[dtype]).removeprefix("torch."), special_ids)
    expected = logits_as_stored(model, lambda name: _stored(name, _DTYPES[dtype]))
    with published(folder, FolderProof(folder, expected)) as building:
        write_json(building / "config.json", config, exact=True)
        # Where the two differ, transformers would go back to the model's config if the file said to be made from it.
        generation: dict[str, Any] = {"_from_model_config": True, **special_ids}
        if stop_ids:
            generation = {**special_ids, "eos_token_id": all_stops(special_ids["eos_token_id"], stop_ids)}
        write_json(building / "generation_config.json", generation, exact=True)
        if tokenizer_folder is not None:
            copy_tokenizer(tokenizer_folder, building, model.config.max_sequence_length)
            if tokenizer_json is not None:
                (building / "tokenizer.json").write_bytes(tokenizer_json)
        tensors = dict(to_huggingface_tensors(model.config, model.state_dict()))
        _write_weights(tensors, building, _DTYPES[dtype], max_shard_bytes)
        mark(building)


def all_stops(eos: int | list[int] | None, others: Collection[int]) -> list[int]:
    """Return all tokens that end a text as `eos_token_id` of a generation config, the end of text first."""
    known = eos if isinstance(eos, list) else [eos]
    return list(dict.fromkeys([*(number for number in known if number is not None), *sorted(others)]))


def _write_weights(tensors: Mapping[str, torch.Tensor], folder: Path, dtype: torch.dtype, max_shard_bytes: int) -> None:
    shards: list[list[str]] = [[]]
    size = total = 0
    for name, tensor in tensors.items():
        needed = tensor.numel() * _stored(name, dtype).itemsize
        if shards[-1] and size + needed > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size = size + needed
        total = total + needed
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map.update(dict.fromkeys(names, file))
        content = {name: tensors[name].detach().to("cpu", _stored(name, dtype)).contiguous() for name in names}
        try:
            save_file(content, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:  # not an OSError, although a full disk is the usual reason
            raise OSError(str(error)) from error
        with (folder / file).open("rb") as written:
            os.fsync(written.fileno())
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map}, exact=True)


def _stored(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the type in which a tensor is stored, by its name in the decoder or in the checkpoint."""
    return torch.float32 if name.endswith((SELECTION_BIAS, "selection_bias")) else dtype


def _special_ids(tokenizer_folder: Path | None) -> dict[str, int | None]:
    """Return the ids of the special tokens that a tokenizer's files name; None for missing ones.

    The ids are always written, since transformers otherwise assumes those of the first Llama.
    """
    ids: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if tokenizer_folder is None:
        return ids
    if not (tokenizer_folder / "tokenizer.json").is_file():
        raise ConfigError(
            "there is no tokenizer", where=str(tokenizer_folder / "tokenizer.json"), fix="give the tokenizer's folder"
        )
    tokenizer = read_settings(tokenizer_folder / "tokenizer.json")
    try:
        vocabulary: dict[Any, int] = _vocabulary(tokenizer)
    except (AttributeError, IndexError, KeyError, TypeError):
        raise CheckpointError(
            "the file is no tokenizer",
            where=str(tokenizer_folder / "tokenizer.json"),
            fix="use the tokenizer of the run",
        ) from None
    config, names = (
        read_settings(file) if (file := tokenizer_folder / name).is_file() else {}
        for name in ("tokenizer_config.json", "special_tokens_map.json")
    )
    # The order of transformers: special_tokens_map.json is older, and wins unless the config has the newer key.
    settings = {**names, **config} if "added_tokens_decoder" in config else {**config, **names}
    for kind in ("bos", "eos", "pad"):
        token = settings.get(f"{kind}_token")
        text = token.get("content") if isinstance(token, dict) else token
        ids[f"{kind}_token_id"] = vocabulary.get(text) if isinstance(text, str) else None
    return ids


def _vocabulary(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Return the id of every token; an end-of-text token may be an ordinary entry of the vocabulary."""
    vocab = tokenizer.get("model", {}).get("vocab", {})
    ids = dict(vocab) if isinstance(vocab, dict) else {entry[0]: number for number, entry in enumerate(vocab)}
    return ids | {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
