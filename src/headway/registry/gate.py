"""The gate of the alias `prod`: checks by which a version may take the place of the present one.

Checks are pure functions of two versions and of what was measured; `run_gate` measures.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headway.core.credentials.secrets import redact
from headway.core.errors import HeadwayError
from headway.core.files.foreign import as_number, parse_json
from headway.core.process.command import module_command
from headway.models.versions import AliasChange, ModelVersion, Reference, ResolvedVersion, local_folder, resolve
from headway.telemetry.record import as_text, dig

#: Aliases that are set only through the gate.
GATED = ("prod",)
#: Metrics of benchmarks of which less is better; of all others more is.
_LESS_IS_BETTER = ("perplexity", "bits_per_byte", "brier_score", "ter", "wer", "loss")
_MOST_NAMED = 5


@dataclass(frozen=True)
class Check:
    """One check, and its result in words."""

    name: str
    passed: bool
    what: str


@dataclass(frozen=True)
class GateSettings:
    """What a comparison needs."""

    margin: str = "1%"
    """How much worse the loss may be, as `headway compare --margin` takes it."""
    data: str | None = None
    """The token store that both are compared on; that of the version's run if None."""


def run_gate(candidate: ResolvedVersion, before: AliasChange | None, settings: GateSettings) -> list[Check]:
    """Check a version before an alias names it.

    Args:
        candidate: The version.
        before: The change of the alias that holds now; None if it was never set.
        settings: For the comparison with the version that it names.
    """
    folder, files = check_files(candidate)
    checks = [files, check_ledger(candidate.version)]
    if before is None or before.number is None:
        return checks
    try:
        present = resolve(Reference(before.name, alias=before.alias), candidate.registry)
    except HeadwayError as error:
        # A version that is lost must not keep a reason from putting another one in its place.
        return [*checks, Check("present", False, f"version {before.number} cannot be compared with: {error.what}")]
    checks.append(check_benchmarks(candidate.version, present.version))
    if folder is not None:
        checks.append(_compare(candidate, present, folder, settings))
    return checks


def check_files(candidate: ResolvedVersion) -> tuple[Path | None, Check]:
    """Verify every byte of a version, and return its folder; None if it is damaged."""
    try:
        folder = local_folder(candidate)
    except HeadwayError as error:
        return None, Check("files", False, error.what)
    return folder, Check("files", True, f"all {len(candidate.version.files)} files are as they were registered")


def check_ledger(version: ModelVersion) -> Check:
    """Check that the ledger of a version's run was proven when it was registered."""
    proof = version.evidence.get("ledger")
    if not isinstance(proof, dict):
        return Check("ledger", False, "it comes from no run, so no ledger proves what it was trained on")
    if proof.get("proven") is not True:
        problems = proof.get("problems")
        words = "; ".join(map(str, problems)) if isinstance(problems, list) else "unknown"
        return Check("ledger", False, f"the ledger of its run is not proven: {words}")
    return Check("ledger", True, f"proven for {proof.get('steps')} steps, {proof.get('rows')} rows")


def check_benchmarks(candidate: ModelVersion, present: ModelVersion) -> Check:
    """Check that no benchmark of the present version is missing or worse."""
    ours = _results(candidate)
    theirs = _results(present)
    if not theirs:
        return Check("benchmarks", True, f"{present} has none to compare with")
    problems = [text for key, value in sorted(theirs.items()) if (text := _worse(key, ours.get(key), value))]
    if problems:
        more = f", and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        return Check("benchmarks", False, f"below {present}: {'; '.join(problems[:_MOST_NAMED])}{more}")
    return Check("benchmarks", True, f"none of {len(theirs)} is below {present}")


def _worse(key: tuple[str, str], ours: float | None, theirs: float) -> str | None:
    task, metric = key
    if ours is None:
        return f"{task} {metric} is not known of it"
    less_is_better = any(word in metric.lower() for word in _LESS_IS_BETTER)
    is_worse = ours > theirs if less_is_better else ours < theirs
    return f"{task} {metric} {ours:.4g} after {theirs:.4g}" if is_worse else None


def _results(version: ModelVersion) -> dict[tuple[str, str], float]:
    return {(task, metric): value for task, metric, value in benchmark_rows(version.evidence)}


def benchmark_rows(evidence: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Yield task, metric and value of each benchmark that is known of a version."""
    found = evidence.get("benchmarks")
    for task, values in found.items() if isinstance(found, dict) else ():
        for metric, value in values.items() if isinstance(values, dict) else ():
            number = as_number(value)
            if number is not None:
                yield task, metric, number


def check_comparison(found: Mapping[str, Any], present: str, margin: str) -> Check:
    """Judge the result of `headway compare --json`."""
    effect = found.get("effect")
    interval = found.get("interval")
    words = f"difference of the loss to {present}: {_number(effect)}"
    if isinstance(interval, list) and len(interval) == 2:
        words += f", 95 % interval {_number(interval[0])} to {_number(interval[1])}"
    passed = found.get("non_inferior") is True
    shown = "within" if passed else "not shown to be within"
    return Check("comparison", passed, f"{words}; {shown} {margin}")


def _number(value: Any) -> str:
    found = as_number(value)
    return "n/a" if found is None else f"{found:+.4g}"


def _compare(candidate: ResolvedVersion, present: ResolvedVersion, folder: Path, settings: GateSettings) -> Check:
    """Compare both on the same documents by `headway compare`, in a process of its own."""
    store = settings.data or as_text(dig(candidate.version.evidence, "data", "store"))
    if store is None:
        return Check("comparison", False, "it is not known what to compare on: --data STORE")
    try:
        before = local_folder(present)
    except HeadwayError as error:
        return Check("comparison", False, f"{present.version} cannot be compared with: {error.what}")
    words = ["compare", str(before), str(folder), "--data", store, "--margin", settings.margin, "--json"]
    done = subprocess.run(module_command("headway", *words), capture_output=True, text=True, check=False)
    try:
        found = parse_json(done.stdout)
    except ValueError:
        found = None
    if not isinstance(found, dict) or "non_inferior" not in found:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        said = next((line for line in lines if line.startswith("error:")), lines[-1])
        return Check("comparison", False, f"they cannot be compared: {redact(said)}")
    return check_comparison(found, str(present.version), settings.margin)


def as_record(checks: list[Check]) -> dict[str, Any]:
    """Return checks as the record of an alias keeps them."""
    return {check.name: asdict(check) for check in checks}
