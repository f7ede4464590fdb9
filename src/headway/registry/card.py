"""The model card of a version: the README.md of its repository on the Hugging Face Hub; what is unknown is n/a."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from headway.core.format import UNKNOWN, format_bytes
from headway.core.hub import is_on_hub, split_hub_name
from headway.models.versions import ModelVersion
from headway.registry.gate import benchmark_rows
from headway.telemetry.model_card import cell, fact_table, place_words, render_card
from headway.telemetry.record import dig

#: What the card of every version names, whether it is known or not.
_ALWAYS = ("parameters", "data", "steps", "tokens", "sequence length", "training loss", "validation loss")


def version_card(version: ModelVersion, title: str | None = None) -> str:
    """Write the card of a version, without places of a machine and without credentials.

    Args:
        version: The version.
        title: Its title; the model's name if None.
    """
    title = title or version.name
    return render_card(title, _header(version, title), _lines(version))


def _header(version: ModelVersion, title: str) -> dict[str, Any]:
    is_adapter = "adapter_config.json" in version.files and "config.json" not in version.files
    header: dict[str, Any] = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["headway"],
    }
    if version.licence is not None:
        header["license"] = version.licence
    base = _base_on_hub(version)
    if base is not None:
        header["base_model"] = base
    results = [
        {
            "task": {"type": "text-generation"},
            "dataset": {"name": task, "type": task},
            "metrics": [{"type": metric, "value": value}],
        }
        for task, metric, value in benchmark_rows(version.evidence)
    ]
    if results:
        header["model-index"] = [{"name": title, "results": results}]
    return header


def _base_on_hub(version: ModelVersion) -> str | None:
    if version.source.get("kind") == "hub":
        return str(version.source.get("repository"))
    return split_hub_name(version.parent)[0] if is_on_hub(version.parent) else None


def _lines(version: ModelVersion) -> Iterator[str]:
    yield f"{_origin(version)} Version {version.number} of `{version.name}` in a registry of Headway."
    yield ""
    yield from fact_table(_facts(version))
    rows = list(benchmark_rows(version.evidence))
    yield from ["", "## Benchmarks", ""]
    if not rows:
        yield UNKNOWN
        return
    yield from ["| task | metric | value |", "|---|---|---|"]
    yield from (f"| {cell(task)} | {cell(metric)} | {value:.4g} |" for task, metric, value in rows)


def _origin(version: ModelVersion) -> str:
    source = version.source
    if source.get("kind") == "run":
        return f"Trained by Headway in the run `{cell(source.get('run'))}`."
    if source.get("kind") == "hub":
        return f"A copy of `{cell(source.get('repository'))}` at commit `{cell(source.get('commit'))}`."
    return "Registered from a folder."


def _facts(version: ModelVersion) -> Iterator[tuple[str, Any]]:
    card = version.evidence.get("card")
    pairs = [tuple(pair) for pair in card if isinstance(pair, list | tuple) and len(pair) == 2] if card else []
    known: dict[Any, Any] = dict(pairs)
    for title in _ALWAYS:
        known.setdefault(title, None)
    for title, value in known.items():
        if value is not None or title in _ALWAYS:
            yield title, UNKNOWN if value is None else value
    parent = version.parent
    yield "parent", UNKNOWN if parent is None else _parent_words(parent)
    yield "licence", version.licence or UNKNOWN
    yield "ledger", ledger_word(version)
    yield "data fingerprint", dig(version.evidence, "data", "fingerprints", "data") or UNKNOWN
    yield "size", format_bytes(version.total_bytes)
    yield "manifest", version.sha256
    yield "signed", "yes (OpenSSF model-signing)" if version.is_signed else "no"
    yield "registered", datetime.fromtimestamp(version.time, UTC).isoformat(" ", "seconds")


def ledger_word(version: ModelVersion) -> str:
    """Return whether the ledger of a version's run was proven when it was registered, in words."""
    proven = dig(version.evidence, "ledger", "proven")
    return {True: "proven", False: "not proven"}.get(proven, UNKNOWN)


def _parent_words(parent: str) -> str:
    is_place = is_on_hub(parent) or "/" in parent
    return place_words(parent) if is_place else f"`{parent}`"
