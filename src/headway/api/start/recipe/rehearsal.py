"""A rehearsal: the run's first steps on a sample of its text, in a folder that disappears, to see how fast it is.

It is `headway train` itself, so what it measures is what the run will do: device, precision, compilation, worker
processes and the model are the run's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from headway.config import Config, load_config
from headway.config.loading.document import to_yaml
from headway.core.coordination.train_command import place, running, train_command
from headway.core.process.command import module_command
from headway.data.store_manifest import read_manifest

#: Steps at the beginning, and share of the time, that are not counted: kernels are chosen, memory is allocated, and
#: after two seconds a run chooses anew how its threads wait (`training/omp_wait_policy.py`).
_WARM = 3
_WARM_SHARE = 0.4
#: Most seconds up to the first step: a compiler or a download may take long.
_PATIENCE = 600.0


@dataclass(frozen=True)
class Sample:
    """A prepared part of the text."""

    store: Path
    bytes_per_token: float
    """Bytes of text for a token."""
    bytes: int
    """Its text."""
    seconds: float
    """Time of its preparation."""

    def seconds_for(self, size: float) -> float:
        """Estimate the time to prepare so many bytes: half of that of a sample is for the start and the vocabulary."""
        return self.seconds * (0.5 + 0.5 * size / self.bytes)

    def bytes_in(self, seconds: float) -> float:
        """Estimate how many bytes are prepared in so many seconds."""
        return max(0.0, 2 * seconds / self.seconds - 1) * self.bytes


@dataclass(frozen=True)
class Rehearsal:
    """What the first steps have shown."""

    tokens_per_second: float
    start_seconds: float
    """From the command to the end of the first step."""
    precision: str
    """What `train.precision: auto` is here."""
    hardware: str
    is_gpu: bool


def prepare_sample(values: dict[str, Any], overrides: Sequence[str], folder: Path) -> Sample:
    """Prepare the sources of a config, which have a limit, into a store in `folder`.

    Raises:
        SystemExit: it failed; the command has said why.
    """
    store = folder / f"store-{time.monotonic_ns()}"
    file = _write(folder / "sample.yaml", values)
    began = time.monotonic()
    command = module_command(
        "headway", "data", "prepare", str(file), *overrides, f"data.store={json.dumps(str(store))}"
    )
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    if done.returncode:
        sys.stderr.buffer.write(done.stderr)
        raise SystemExit(done.returncode)
    seconds = time.monotonic() - began
    sources = read_manifest(store)["sources"]
    read = sum(source["text_bytes"] for source in sources)
    return Sample(store, read / max(1, sum(source["tokens"] for source in sources)), read, seconds)


def rehearse(values: dict[str, Any], overrides: Sequence[str], sample: Sample, *, seconds: float) -> Rehearsal:
    """Train on a sample for some seconds after the first step.

    Args:
        values: The config, as in a file.
        overrides: Of the user.
        sample: From `prepare_sample` for the same vocabulary.
        seconds: How long, after the first step.

    Raises:
        SystemExit: training failed; what it wrote is shown.
    """
    folder = sample.store.parent
    name = f"rehearsal-{time.monotonic_ns()}"
    file = _write(folder / f"{name}.yaml", values)
    log = folder / f"{name}.log"
    here = [f"data.store={json.dumps(str(sample.store))}", "train.steps=1000000", "telemetry.report=false"]
    began = time.monotonic()
    with running(train_command(file, *overrides, *here, *place(name, folder)), log, {}) as process:
        metrics = folder / name / "metrics.jsonl"
        first = None
        while process.poll() is None:
            time.sleep(0.1)
            if first is None and metrics.is_file() and metrics.stat().st_size:
                first = time.monotonic()
            if time.monotonic() - (first or began) > (seconds if first else _PATIENCE):
                break
        ended = process.poll()
    records = _steps(metrics)
    if ended is not None or len(records) <= _WARM:
        sys.stderr.write(log.read_text(encoding="utf-8", errors="replace")[-3000:])
        raise SystemExit(ended or 1)
    timed = records[max(_WARM, _warm_steps(records)) :] or records[-1:]
    tokens = sum(record["train/items"] for record in timed)
    spent = sum(record["speed/step_seconds"] for record in timed)
    config = load_config(folder / name / "config.yaml")
    hardware = json.loads((folder / name / "run.json").read_text(encoding="utf-8"))["hardware"]
    return Rehearsal(tokens / spent, (first or began) - began, config.train.precision, *_named(hardware))


def _warm_steps(records: Sequence[dict[str, Any]]) -> int:
    """Return the number of steps in the first part of the time."""
    ends = list(accumulate(record["speed/step_seconds"] for record in records[1:]))  # the first has a start in it
    return 1 + sum(1 for end in ends if end < _WARM_SHARE * ends[-1])


def _named(hardware: dict[str, Any]) -> tuple[str, bool]:
    accelerators = hardware.get("accelerators") or []
    if accelerators:
        return f"{len(accelerators)} {accelerators[0].get('name', 'GPU')}", True
    return f"{hardware.get('cores_usable', 'n/a')} cores of {hardware.get('cpu', 'an unknown CPU')}", False


def _steps(metrics: Path) -> list[dict[str, Any]]:
    """Read the records of steps; the last line may be cut."""
    if not metrics.is_file():
        return []
    lines = metrics.read_bytes().split(b"\n")[:-1]
    records = [json.loads(line) for line in lines]
    return [record for record in records if "train/items" in record]


def _write(file: Path, values: dict[str, Any]) -> Path:
    file.write_text(to_yaml(values), encoding="utf-8")
    return file


def load(values: dict[str, Any], overrides: Sequence[str], folder: Path) -> Config:
    """Load a config that is not in a file yet, with overrides, as the run will."""
    return load_config(_write(folder / "config.yaml", values), overrides)
