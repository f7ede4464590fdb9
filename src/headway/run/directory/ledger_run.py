"""Checks of which run made the checkpoints in a run directory: the ledger proves only the steps of its own run."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from headway.checkpoint.format.manifest import MANIFEST, step_name
from headway.checkpoint.run_identity import IDENTITY, OF_RUN, RUN_FILE, RUN_ID, in_words, run_record
from headway.core.files.foreign import read_json_or_empty
from headway.telemetry.record import RESTORED, Run, dig


def checkpoints_of_others(record: Run, taken_over: Collection[int]) -> Iterator[str]:
    """Yield problems with checkpoints that another run made, and that were not restored into this one by hand.

    Args:
        record: The run.
        taken_over: Steps of the checkpoints whose commits were taken over. One without a run id, from an older version,
            must have a config that this run has had.
    """
    configs = {dig(facts, "fingerprints", "config") for facts in recorded_facts(record)} - {None}
    for step, context in _contexts(record):
        if step in _restored(record):
            continue
        made_by = run_record(context.get(OF_RUN))
        if made_by is not None and made_by["id"] != record.facts.get(RUN_ID, made_by["id"]):
            yield f"step-{step:08d} was made by another run: {in_words(made_by)}"
        config = context.get(IDENTITY)
        if made_by is None and step in taken_over and config is not None and configs and config not in configs:
            yield (
                f"step-{step:08d} was made elsewhere with a config that no attempt of this run has had: it belongs to"
                " another run"
            )


def restored_from_others(record: Run, begun_at: Collection[int]) -> Iterator[str]:
    """Yield the checkpoints here that were restored by hand from other runs, in words.

    Args:
        record: The run.
        begun_at: Steps at which runs began from checkpoints of others, which the ledger records.
    """
    for step, context in _contexts(record):
        if step in begun_at:
            continue
        made_by = run_record(context.get(OF_RUN))
        if step in _restored(record) and made_by is not None and made_by["id"] != record.facts.get(RUN_ID):
            yield f"but step-{step:08d} was restored by hand from another run: {in_words(made_by)}"


def _contexts(record: Run) -> Iterator[tuple[int, dict[str, Any]]]:
    for checkpoint in record.checkpoints:
        context = manifest_of(record, checkpoint.step).get("context")
        if isinstance(context, dict):
            yield checkpoint.step, context


def manifest_of(record: Run, step: int) -> dict[str, Any]:
    """Return the manifest of a run's checkpoint; empty if there is none that can be read."""
    return read_json_or_empty(record.path / "checkpoints" / step_name(step) / MANIFEST)


def recorded_facts(record: Run) -> Iterator[dict[str, Any]]:
    """Yield `run.json` of the run and of each of its attempts."""
    yield record.facts
    for path in record.path.glob(f"attempts/*/{RUN_FILE}"):
        yield read_json_or_empty(path)


def _restored(record: Run) -> set[int | None]:
    return {attempt.last_step for attempt in record.attempts if attempt.outcome == RESTORED}
