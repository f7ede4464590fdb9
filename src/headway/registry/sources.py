"""Where a version comes from: a run, which is exported, a folder, or a model of the Hub; and what is known of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from headway.checkpoint.retention import Rules
from headway.core.console import warning
from headway.core.errors import CheckpointError, ConfigError
from headway.core.files.foreign import SETTINGS_BYTES, as_number, read_json_or_empty, read_text
from headway.core.files.scratch import scratch_folder
from headway.core.hub import is_on_hub, snapshot, split_hub_name
from headway.models.hub.folder import is_adapter, open_folder, pinned_source
from headway.models.hub.push import CARD
from headway.run.directory.ledger_proof import LedgerProof, prove
from headway.telemetry.model_card import card_facts
from headway.telemetry.record import Run, as_text, dig, is_run, open_run
from headway.training.evaluation.benchmarks import results_path
from headway.training.evaluation.inference import TrainedModel, export_trained, load_trained

_LICENCE = re.compile(r"^license:[ \t]*[\"']?([A-Za-z0-9][A-Za-z0-9.+-]{0,63})[\"']?[ \t]*$", re.MULTILINE)
#: Sources whose names and counts are kept; more only as a number.
_MOST_SOURCES = 1000


@dataclass(frozen=True)
class Gathered:
    """A folder with a model, and what is known of it."""

    folder: Path
    source: Mapping[str, Any]
    evidence: Mapping[str, Any] = field(default_factory=dict)
    parent: str | None = None
    licence: str | None = None


@dataclass(frozen=True)
class ExportOptions:
    """Which checkpoint of a run is exported, and how."""

    step: int | None = None
    """The newest good one if None."""
    best: bool = False
    """Take the best one by the run's `checkpoint.keep_metric` instead."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    merge: bool = False
    """Merge an adapter into its model."""


@contextmanager
def gathered(model: str, options: ExportOptions) -> Iterator[Gathered]:
    """Open what is to be registered: a run's export lives as long as the block.

    Args:
        model: A run directory, a folder of Hugging Face, or `hf://organisation/name`.
        options: For a run.

    Raises:
        ConfigError: It is none of these.
        CheckpointError: A run has no checkpoint that verifies.
    """
    if is_on_hub(model):
        pinned = str(pinned_source(model))
        name, commit = split_hub_name(pinned)
        folder = open_folder(pinned)
        snapshot(pinned, [CARD])
        yield _of_folder(folder, {"kind": "hub", "repository": name, "commit": commit})
        return
    path = Path(model)
    if not is_run(path):
        if not path.is_dir():
            raise ConfigError(
                "there is no run and no model's folder of this name", where=model, fix="name a folder, or hf://org/name"
            )
        yield _of_folder(path, {"kind": "folder", "folder": path.resolve().name})
        return
    with scratch_folder("headway-registry-") as scratch:
        yield _of_run(path, options, scratch / "model")


def _of_folder(folder: Path, source: Mapping[str, Any]) -> Gathered:
    base = read_json_or_empty(folder / "adapter_config.json", SETTINGS_BYTES).get("base_model_name_or_path")
    parent = base if isinstance(base, str) and not Path(base).is_absolute() else None
    return Gathered(folder, source, parent=parent, licence=_licence(folder))


def _of_run(path: Path, options: ExportOptions, folder: Path) -> Gathered:
    run = open_run(path)
    trained = _load_best(run) if options.best else load_trained(path, step=options.step)
    step = trained.step or 0
    export_trained(trained, folder, options.dtype, merge=options.merge)
    checkpoint = next((one for one in run.checkpoints if one.step == step), None)
    source = {
        "kind": "run",
        "run": run.name,
        "run_id": as_text(run.facts.get("id")),
        "step": step,
        "state_sha256": checkpoint.state_sha256 if checkpoint is not None else None,
        "dtype": options.dtype,
    }
    evidence = {
        "ledger": ledger_evidence(prove(path), step),
        "config": run.config,
        "data": data_evidence(run),
        "metrics": metrics_at(run, step),
        "benchmarks": benchmark_results(results_path(path, step)),
        "card": card_facts(run, step),
        "is_adapter": is_adapter(folder),
    }
    base = run.get("model.from_pretrained")
    known = {key: value for key, value in evidence.items() if value}
    return Gathered(folder, source, known, parent=base if isinstance(base, str) else None)


def _load_best(run: Run) -> TrainedModel:
    """Load the best checkpoint that verifies.

    Raises:
        CheckpointError: No checkpoint has the metric of the run's retention.
    """
    for step in ranked_steps(run):
        try:
            return load_trained(run.path, step=step)
        except CheckpointError as error:
            warning(f"the checkpoint of step {step:,} is damaged, and passed over: {error.what}")
    raise CheckpointError(
        "no checkpoint has a known value of checkpoint.keep_metric",
        where=str(run.path),
        fix="--step N, or leave out --best for the newest",
    )


def ranked_steps(run: Run) -> list[int]:
    """Return the steps of checkpoints whose value of the run's retention metric is known, the best first."""
    rules = Rules()
    metric = as_text(run.get("checkpoint.keep_metric")) or rules.keep_metric
    mode = as_text(run.get("checkpoint.keep_mode")) or rules.keep_mode
    steps, values = run.metrics.finite(metric)
    known = dict(zip(map(int, steps), map(float, values), strict=True))
    return sorted(
        (one.step for one in run.checkpoints if one.step in known),
        key=lambda step: (known[step] if mode == "min" else -known[step], -step),
    )


def ledger_evidence(proof: LedgerProof, step: int) -> dict[str, Any]:
    """Return what a ledger's proof says of the rows up to a step."""
    covers = proof.steps >= step
    problems = list(proof.problems) if covers else [*proof.problems, f"the ledger ends at step {proof.steps:,}"]
    return {
        "proven": not problems,
        "problems": problems[:20],
        "steps": proof.steps,
        "rows": proof.rows,
        "basis": proof.basis if not problems else [],
    }


def data_evidence(run: Run) -> dict[str, Any]:
    """Return what identifies the data of a run: fingerprints, and each source with its counts."""
    fingerprints = run.facts.get("fingerprints")
    found: dict[str, Any] = {"fingerprints": fingerprints} if isinstance(fingerprints, dict) else {}
    manifest = run.data_manifest
    sources = manifest.get("sources")
    if isinstance(sources, list):
        keys = ("name", "files", "documents", "tokens", "input_bytes")
        found["sources"] = [{key: dig(one, key) for key in keys} for one in sources[:_MOST_SOURCES]]
        found["inputs_sha256"] = manifest.get("inputs_sha256")
        found["split"] = manifest.get("split")
    store = run.get("data.store")
    if isinstance(store, str):
        # A relative path is relative to the folder in which the run was started.
        found["store"] = str(Path(as_text(run.facts.get("folder")) or "", store))
    return found


def metrics_at(run: Run, step: int) -> dict[str, float]:
    """Return the newest finite value up to a step of the training loss and of each metric of evaluation."""
    names = [name for name in run.metrics.names if name == "train/loss" or name.startswith("evaluation/")]
    found = {}
    for name in names:
        steps, values = run.metrics.finite(name)
        before = [float(value) for at, value in zip(steps, values, strict=True) if at <= step]
        if before:
            found[name] = before[-1]
    return found


def benchmark_results(path: Path) -> dict[str, dict[str, float]]:
    """Return the results in a file that `headway benchmark --json` or a run has written; empty without one."""
    results = read_json_or_empty(path, SETTINGS_BYTES).get("results")
    if not isinstance(results, dict):
        return {}
    found: dict[str, dict[str, float]] = {}
    for task, values in results.items():
        numbers = {name: as_number(value) for name, value in values.items()} if isinstance(values, dict) else {}
        found[str(task)] = {str(name): value for name, value in numbers.items() if value is not None}
    return found


def with_benchmarks(found: Gathered, file: Path) -> Gathered:
    """Add the results of a file to what is known.

    Raises:
        ConfigError: It holds none.
    """
    results = benchmark_results(file)
    if not results:
        fix = f"headway benchmark MODEL --tasks NAME --json > {file}"
        raise ConfigError("the file holds no results of benchmarks", where=str(file), fix=fix)
    known = found.evidence.get("benchmarks", {})
    return replace(found, evidence={**found.evidence, "benchmarks": {**known, **results}})


def _licence(folder: Path) -> str | None:
    """Return the licence in the head of a folder's model card; only that line of it is read."""
    try:
        text = read_text(folder / CARD)
    except (OSError, ValueError):
        return None
    head = text.split("\n---", 1)[0] if text.startswith("---\n") else ""
    found = _LICENCE.search(head)
    return found[1] if found else None
