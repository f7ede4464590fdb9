"""The descriptions in a store: the manifest, for training, and the inputs, for people.

Neither has times, absolute paths or anything else that would differ for equal text on another machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headway.config.sections.data import DataConfig
from headway.core.files.hashes import sha256_bytes
from headway.data.loss_mask import LEFT_OUT, ROWS_WITHOUT_TARGET
from headway.data.made_of import source_settings
from headway.data.store_manifest import FORMAT, VERSION
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.text.preparing.build import Outcome
from headway.text.preparing.pieces import SPLITS
from headway.text.preparing.records import added_counts
from headway.text.reading.sources import Source

_READ = ("read", "empty", "skipped")
_WRITTEN = ("documents", "tokens", "characters", "text_bytes")


def inputs_json(
    data: DataConfig, sources: Sequence[Source], outcomes: Sequence[Outcome], duplicates: dict[str, Any] | None
) -> dict[str, Any]:
    """Describe the input: the settings, files, counts and cleaning of each source; and the duplicates."""
    described = []
    for number in range(len(sources)):
        mine = [outcome for outcome in outcomes if outcome.unit.source == number]
        facts = source_settings(data, number) | _counts(mine)
        cleaned = _cleaned(mine)
        if cleaned is not None:
            facts["clean"] = cleaned
        facts["files"] = [file for outcome in mine for file in outcome.inputs]
        described.append(facts)
    return {"sources": described, **({"duplicates": duplicates} if duplicates is not None else {})}


def manifest_json(
    settings: dict[str, Any],
    tokenizer: Tokenizer,
    sources: Sequence[Source],
    outcomes: Sequence[Outcome],
    *,
    bound: int,
    inputs: bytes,
    begin: Mapping[str, int],
) -> dict[str, Any]:
    """Return the manifest: everything that training needs to know about the store.

    Args:
        settings: What `settings_json` returns.
        tokenizer: The vocabulary.
        sources: The sources.
        outcomes: The outcomes of all units.
        bound: Documents whose hash is below it are held out for validation.
        inputs: The content of the store's description of its inputs.
        begin: The tokens that begin every document, with their ids.
    """
    summaries = []
    for number, source in enumerate(sources):
        mine = [outcome for outcome in outcomes if outcome.unit.source == number]
        files = {file["path"] for outcome in mine for file in outcome.inputs}
        size = sum(file["bytes"] for outcome in mine for file in outcome.inputs)
        summaries.append({"name": source.name, "files": len(files), "input_bytes": size, **_counts(mine)})
    return {
        **head_json(tokenizer, begin),
        "settings": settings,
        "split": {"rule": "the first 64 bits of SHA-256(text) < bound: validation", "bound": str(bound)},
        "inputs_sha256": sha256_bytes(inputs),
        "sources": summaries,
        "splits": {split: _split(split, sources, outcomes) for split in SPLITS},
    }


def _counts(outcomes: Sequence[Outcome]) -> dict[str, int]:
    counts = {key: sum(getattr(outcome.survey, key) for outcome in outcomes) for key in _READ}
    counts |= {key: sum(getattr(outcome.shards, key) for outcome in outcomes) for key in _WRITTEN}
    unencodable = sum(outcome.shards.unencodable for outcome in outcomes)
    trained = sum(outcome.shards.trained_tokens for outcome in outcomes)
    counts |= {"trained_tokens": trained} if trained else {}
    return counts | ({"unencodable": unencodable} if unencodable else {})


def _cleaned(outcomes: Sequence[Outcome]) -> dict[str, Any] | None:
    """Add up the cleaners' counts of a source in input order."""
    total: dict[str, Any] | None = None
    for outcome in outcomes:
        if outcome.survey.clean is not None:
            total = added_counts(total, outcome.survey.clean)
    return total


def _split(split: str, sources: Sequence[Source], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    for number, source in enumerate(sources):
        mine = (outcome for outcome in outcomes if outcome.unit.source == number)
        shards = [outcome.shards.splits[split] for outcome in mine if split in outcome.shards.splits]
        parts[source.name] = part_json(shards)
    return parts


def part_json(shards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the manifest's entry for a source in a split, from the entries of its shards."""
    has_masks = any("mask_sha256" in shard for shard in shards)
    return {
        "documents": sum(shard["documents"] for shard in shards),
        "tokens": sum(shard["tokens"] for shard in shards),
        # Stores of earlier versions do not have it, and keep their rows.
        **({ROWS_WITHOUT_TARGET: LEFT_OUT} if has_masks else {}),
        "shards": list(shards),
    }


def head_json(tokenizer: Tokenizer, begin: Mapping[str, int]) -> dict[str, Any]:
    """Return the head of every manifest: the format, and the meaning of ids.

    Args:
        tokenizer: The vocabulary.
        begin: The tokens that begin every document, with their ids.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "dtype": tokenizer.dtype.name,
        "tokenizer": {
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "end_of_text": tokenizer.end_of_text,
            "end_of_text_id": tokenizer.end_of_text_id,
            **({"begin_of_text": list(begin), "begin_of_text_ids": list(begin.values())} if begin else {}),
        },
    }
