"""The model card of a run: the README.md of its repository on the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from headway.core.credentials.secrets import redact
from headway.core.format import format_count
from headway.core.hub import HUB, is_on_hub, split_hub_name
from headway.telemetry.record import Run, as_int, dig


def model_card(run: Run, repository: str, step: int | None = None, *, is_adapter: bool = False) -> str:
    """Write the card of a run's model, without places of this machine and without credentials.

    Args:
        run: The run that the model comes from.
        repository: `organisation/name`.
        step: Of its weights; the newest finished one when not given.
        is_adapter: The model is an adapter of peft by itself.
    """
    step = run.step if step is None else step
    base = run.get("model.from_pretrained")
    base = base if isinstance(base, str) else None
    on_hub = split_hub_name(base)[0] if base is not None and is_on_hub(base) else None
    header: dict[str, Any] = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["headway"],
        **({"base_model": on_hub} if on_hub else {}),
    }
    kind = "An adapter of" if is_adapter else "Continues"
    about = [
        f"Trained by Headway in the run `{run.name}`.",
        *(["", f"{kind} {place_words(base)}."] if base is not None else []),
    ]
    facts = [(title, value) for title, value in card_facts(run, step) if value is not None]
    return render_card(repository.partition("/")[2], header, [*about, "", *fact_table(facts)])


def render_card(title: str, header: Mapping[str, Any], lines: Iterable[str]) -> str:
    """Return the text of a card without credentials: what programs read at its head, a title, and lines of Markdown."""
    text = "\n".join([f"# {title}", "", *lines]) + "\n"
    return redact(f"---\n{yaml.safe_dump(dict(header), sort_keys=False)}---\n\n{text}")


def fact_table(facts: Iterable[Sequence[Any]]) -> list[str]:
    """Return the lines of a table of titles and values."""
    return ["| | |", "|---|---|", *(f"| {cell(title)} | {cell(value)} |" for title, value in facts)]


def card_facts(run: Run, step: int) -> list[tuple[str, Any]]:
    """Return what a card says of a run's model, in order, by title; None is unknown."""
    batches = run.batches
    parameters = as_int(dig(run.facts, "model", "parameters"))
    tokens = None if batches is None else batches.tokens_before(step)
    sources = [name for source in run.get("data.sources") or [] if (name := _source(source))]
    return [
        ("parameters", format_count(parameters) if parameters else None),
        ("data", ", ".join(sources) or None),
        ("steps", f"{step:,}"),
        ("tokens", format_count(tokens) if tokens is not None else None),
        ("sequence length", run.get("train.sequence_length")),
        ("optimizer", run.get("optimizer.name")),
        ("learning rate", run.get("optimizer.learning_rate")),
        ("adapter", run.get("model.adapter.method")),
        ("training loss", _at(run, "train/loss", step)),
        ("validation loss", _at(run, "evaluation/loss", step)),
        ("seed", run.get("seed")),
    ]


def _at(run: Run, metric: str, step: int) -> str | None:
    """Return the newest finite value of a loss up to a step."""
    steps, values = run.metrics.finite(metric)
    found = [float(value) for at, value in zip(steps, values, strict=True) if at <= step]
    return f"{found[-1]:.4f}" if found else None


def _source(source: Any) -> str | None:
    """Name a source, by its place too where that is not on this machine."""
    name = dig(source, "name")
    path = dig(source, "path")
    if not isinstance(path, str) or "://" not in path:
        return name if isinstance(name, str) else None
    return path if not isinstance(name, str) else f"{name} ({path})"


def place_words(base: str) -> str:
    """Name a pretrained model; of a local folder, only the last part of its path."""
    return f"`{base.removeprefix(HUB)}`" if is_on_hub(base) else f"`{base.rstrip('/').rpartition('/')[2]}`"


def cell(value: Any) -> str:
    """Return a value as it stands in a line or a cell of a table, whatever is in it."""
    return " ".join(str(value).split()).replace("|", "\\|")
