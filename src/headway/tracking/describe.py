"""What trackers get about a run in addition to its metrics, from its run directory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.config import Config
from headway.core.coordination.outcomes import BUDGET_REACHED, FINISHED, PREEMPTED
from headway.core.credentials.secrets import redact, redact_values
from headway.core.errors import INTERRUPTED
from headway.core.files.foreign import as_number, read_json_or_empty, read_text
from headway.core.files.hashes import fingerprint
from headway.telemetry.record import DIED, NOT_ENDED, RESTORED, RUNNING, Run, as_text, dig
from headway.tracking.sink import Dataset, Description, Status

#: Files that are sent as artifacts, and the most bytes of one.
_FILES = ("config.yaml", "report.html", "samples.txt")
_FILE_BYTES = 32 * 2**20
#: Most rollbacks and segments that are named one by one.
_NAMED = 20


def run_id(run: Run) -> str | None:
    """Return the id of a run; None while it has not begun. Runs of early versions get one from their first attempt."""
    facts = run.facts
    found = as_text(facts.get("id"))
    if found is not None:
        return found
    first = next(iter(run.attempt_records.values()), {})
    known = {
        key: value for key, value in (("created", facts.get("created")), ("started", first.get("started"))) if value
    }
    return fingerprint({"name": run.name, **known})[:32] if known else None


def describe(run: Run) -> Description:
    """Return the description of a run as it is now."""
    parameters, defaults = _parameters(run.config)
    return Description(
        name=run.name,
        parameters=dict(redact_values(parameters)),
        tags={name: redact(text) for name, text in _tags(run)},
        datasets=tuple(_datasets(run)),
        files=dict(_files(run)),
        defaults=dict(redact_values(defaults)),
    )


def stamps(path: Path) -> dict[str, tuple[int, int]]:
    """Return when what a description is made from was changed last, and its sizes."""
    files = [*(path / name for name in (*_FILES, "run.json", "ledger.jsonl")), *path.glob("attempts/*/attempt.json")]
    found = {}
    for file in files:
        with suppress(OSError):
            seen = file.stat()
            found[str(file)] = (seen.st_mtime_ns, seen.st_size)
    return found


def status(run: Run) -> tuple[Status, float | None]:
    """Return how a run stands, and when it ended."""
    state = run.state
    records = run.attempt_records
    newest = records[max(records)] if records else {}
    if state in (RUNNING, NOT_ENDED):
        return "running", None
    moment = as_number(newest.get("ended"))
    if state == FINISHED:
        return "finished", moment
    was_stopped = "stopped_by" in newest or newest.get("exit_code") == INTERRUPTED
    may_continue = state in (PREEMPTED, BUDGET_REACHED, DIED, RESTORED)
    return ("killed" if may_continue or was_stopped else "failed"), moment


def is_changed(run: Run, attempt: int, before: int) -> bool:
    """Return whether an attempt trained something else than an earlier one: after a restore, or a change."""
    records = run.attempt_records
    if any(before < number <= attempt and records[number].get("outcome") == RESTORED for number in records):
        return True
    old, new = (_fingerprints(run, number) for number in (before, attempt))
    return any(old.get(key) != new.get(key) for key in ("config", "data") if key in old and key in new)


def _fingerprints(run: Run, attempt: int) -> Mapping[str, Any]:
    found = dig(read_json_or_empty(run.path / "attempts" / f"{attempt:03d}" / "run.json"), "fingerprints")
    return found if isinstance(found, dict) else {}


def _tags(run: Run) -> Iterator[tuple[str, str]]:
    facts = run.facts
    records = run.attempt_records
    for name, keys in (
        ("headway.git.commit", ("git", "commit")),
        ("headway.git.branch", ("git", "branch")),
        ("headway.python", ("environment", "python")),
        ("headway.platform", ("environment", "platform")),
        ("headway.command", ("command",)),
        ("headway.cpu", ("hardware", "cpu")),
    ):
        if (text := as_text(dig(facts, *keys))) is not None:
            yield name, text
    for package in ("headway", "torch", "transformers"):
        if (text := as_text(dig(facts, "environment", "packages", package))) is not None:
            yield f"headway.package.{package}", text
    for key in ("data", "tokenizer", "config"):
        if (text := as_text(dig(facts, "fingerprints", key))) is not None:
            yield f"headway.fingerprint.{key}", text
    yield "headway.folder", str(run.path.resolve())
    yield "headway.attempts", str(len(records))
    if records:
        yield "headway.outcome", run.outcome
    if ranges := run.skipped_ranges:
        steps = [f"{first + 1} to {last}" for first, last in ranges[-_NAMED:]]
        yield "headway.rollbacks", f"{len(ranges)}; steps left out: {', '.join(steps)}"
    if len(run.segments) > 1:
        changed = [f"after step {s.first_step}: {'; '.join(s.changes)}" for s in run.segments[1:][-_NAMED:]]
        yield "headway.segments", f"{len(run.segments)}; {' | '.join(changed)}"


def _datasets(run: Run) -> Iterator[Dataset]:
    digest = as_text(dig(run.facts, "fingerprints", "data"))
    sources = run.get("data.sources")
    for source in sources if digest is not None and isinstance(sources, list) else ():
        path = redact(as_text(dig(source, "path")) or "")
        yield Dataset(as_text(dig(source, "name")) or path, digest or "", path)


def _files(run: Run) -> Iterator[tuple[str, str]]:
    for name in _FILES:
        try:
            yield name, redact(read_text(run.path / name, _FILE_BYTES))
        except (OSError, ValueError):
            continue


def _parameters(config: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the values of a config that differ from its defaults, and the others, as texts by dotted key.

    All differ in a config that this version cannot read.
    """
    given = {key: value for key, value in config.items() if key != "segments"}
    try:
        known = Config.model_validate(given)
    except (TypeError, ValueError):
        return {name: _text(value) for name, value in _flat(given)}, {}
    every = {name: _text(value) for name, value in _flat(known.model_dump(mode="json", exclude={"segments"}))}
    unlike = known.model_dump(mode="json", exclude={"segments"}, exclude_defaults=True)
    found = {name: every[name] for name, _ in _flat(unlike, known.model_dump(mode="json")) if name in every}
    return found, {name: text for name, text in every.items() if name not in found}


def _flat(values: Any, whole: Any = None, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield values by dotted key. Items of a list of sections have the key of their name, or else of their place.

    Args:
        values: A config, or a part of one.
        whole: The same with all its keys, by which items are named; None if `values` has them.
        prefix: What stands before the keys.
    """
    whole = values if whole is None else whole
    if isinstance(values, Mapping) and values:
        for key, value in values.items():
            yield from _flat(value, whole[key], f"{prefix}{key}.")
    elif isinstance(values, list) and values and all(isinstance(item, Mapping) for item in values):
        names = [str(item.get("name") or number) for number, item in enumerate(whole)]
        for number, item in enumerate(values):
            name = names[number] if names.count(names[number]) == 1 else str(number)
            kind = {"step": whole[number]["step"]} if "step" in whole[number] else {}  # which of the cleaning steps
            yield from _flat({**kind, **item}, whole[number], f"{prefix}{name}.")
    else:
        yield prefix.removesuffix("."), values


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
