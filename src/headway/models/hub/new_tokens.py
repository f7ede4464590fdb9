"""New tokens for the vocabulary of a pretrained model: rows of its embeddings and of its output projection."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from headway.config import ModelConfig
from headway.core.errors import ConfigError
from headway.models.hub.folder import is_adapter
from headway.models.hub.transformers_build import complete_from_transformers, explained, load_transformers, quiet
from headway.models.hub.transformers_model import TransformersModel
from headway.models.huggingface.checkpoint import copy_tokenizer
from headway.models.huggingface.folder import check_not_foreign, mark, published
from headway.models.written import FolderProof, logits_as_stored


def extend_vocabulary(source: Path, folder: Path, pieces: Mapping[int, Sequence[int]], tokenizer_json: bytes) -> None:
    """Write a copy of a model with rows for new tokens, each the mean of the rows of the token's pieces.

    Old rows and all other weights keep their values and types. A new token then means what its text meant before,
    which trains faster than a random row (Hewitt 2021, "Initializing new word embeddings for pretrained language
    models"). The folder is complete or absent.

    Args:
        source: Folder of the model.
        folder: Output folder.
        pieces: Ids of each new token's text in the old vocabulary, by the id of the new token.
        tokenizer_json: Content of the `tokenizer.json` with the new tokens.

    Raises:
        ConfigError: The model is an adapter, transformers cannot load it, or the output folder holds something else.
        CheckpointError: The copy does not compute what the extended model computes.
        OSError: The copy cannot be written.
    """
    folder = folder.resolve()
    check_not_foreign(folder)
    if is_adapter(source):
        fix = "extend the model below the adapter, and train a new one"
        raise ConfigError("an adapter has no vocabulary of its own", where=str(source), fix=fix)
    with explained(source):
        network = load_transformers().AutoModelForCausalLM.from_pretrained(
            source, dtype="auto", local_files_only=True, use_safetensors=True
        )
        rows = max(network.get_input_embeddings().num_embeddings, *(number + 1 for number in pieces))
        network.resize_token_embeddings(rows, mean_resizing=False)
    head = network.get_output_embeddings()
    matrices = [network.get_input_embeddings().weight, getattr(head, "weight", None), getattr(head, "bias", None)]
    with torch.no_grad():
        for matrix in {id(one): one for one in matrices if one is not None}.values():  # tied ones only once
            old = matrix.float()
            for number, parts in pieces.items():
                matrix[number] = old[list(parts)].mean(0).to(matrix.dtype)
    config = complete_from_transformers(ModelConfig(from_pretrained=source), network.config)
    proof = FolderProof(folder, logits_as_stored(TransformersModel(config, network)))
    with published(folder, proof) as building, quiet():
        network.save_pretrained(building)
        copy_tokenizer(source, building, getattr(network.config, "max_position_embeddings", 0))
        (building / "tokenizer.json").write_bytes(tokenizer_json)
        mark(building)


def with_new_tokens(tokenizer_json: bytes, tokens: Mapping[str, bool], first: int) -> bytes:
    """Return a `tokenizer.json` with new tokens, which have the flags that transformers gives them.

    Args:
        tokenizer_json: The old one.
        tokens: The new tokens, and whether each is special.
        first: Id of the first; the others follow.
    """
    spec = json.loads(tokenizer_json)
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    added = [
        {"id": number, "content": token, **plain, "normalized": not special, "special": special}
        for number, (token, special) in enumerate(tokens.items(), first)
    ]
    spec["added_tokens"] = [*(spec.get("added_tokens") or []), *added]
    return json.dumps(spec, ensure_ascii=False).encode()
