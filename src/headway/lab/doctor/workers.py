"""Starts the workers of the communication benchmark, or joins those that torchrun has started."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from headway.core.console import notice
from headway.core.coordination.launched import world_size_from_environment
from headway.core.errors import ConfigError
from headway.core.files.atomic import write_json
from headway.core.files.scratch import scratch_folder
from headway.lab.doctor.bandwidth import Communication
from headway.lab.doctor.communication import CommunicationFailed, Plan, measure_communication
from headway.parallel.world import pick_device
from headway.run.supervisor.local_workers import WorkersFailed, WorkersStopped, start_workers
from headway.run.supervisor.watchdog import in_words

_KIB = 2**10
_MIB = 2**20

#: Default sizes: small enough for a CPU, large enough to saturate NVLink.
_SIZES = {"cpu": (64 * _KIB, _MIB, 16 * _MIB), "cuda": (_MIB, 16 * _MIB, 256 * _MIB)}


def run_communication(
    workers: int | None,
    device: str,
    sizes_bytes: tuple[int, ...] | None,
    nccl_profile: str,
    *,
    determinism: str = "run",
    timeout_seconds: int = 60,
) -> Communication:
    """Measure between workers of this machine, or between the workers that torchrun has started.

    Args:
        workers: Number of workers; by default one per GPU, or two on the CPU.
        device: "auto", "cuda" or "cpu".
        sizes_bytes: Sizes of the arrays; by default chosen by the device.
        nccl_profile: Value of `parallel.nccl_profile`.
        determinism: Level of determinism of the runs to measure for.
        timeout_seconds: Timeout of a collective.

    Raises:
        CommunicationFailed: a worker fails; it has the message of the first failure.
        ConfigError: the device is missing, or there are fewer than two workers.
    """
    try:
        kind = pick_device(device).type
    except ConfigError as error:
        raise ConfigError(error.what, where="--device", fix="--device auto") from None
    kind = "cpu" if kind == "mps" else kind  # mps has no process groups
    sizes = sizes_bytes or _SIZES[kind]
    plan = Plan(kind, sizes, timeout_seconds=timeout_seconds, nccl_profile=nccl_profile, determinism=determinism)
    started = world_size_from_environment()
    if started is not None and workers not in (None, started):
        raise ConfigError(
            f"torchrun has started {started} workers, not {workers}",
            where="--workers",
            fix=f"torchrun --nproc-per-node {workers}",
        )
    count = started or workers or _default_workers(kind)
    if count < 2:
        raise ConfigError(
            f"{count} worker cannot communicate: two are needed",
            where="--workers",
            fix="headway doctor --communication --workers 2 --device cpu",
        )
    if started is not None:
        return measure_communication(plan)
    if kind == "cuda":
        pick_device("cuda", count - 1)  # raises if there are more workers than GPUs, before any is started
    return _with_own_workers(count, plan)


def _default_workers(kind: str) -> int:
    import torch

    return torch.cuda.device_count() if kind == "cuda" else 2


def _with_own_workers(count: int, plan: Plan) -> Communication:
    notice(f"starting {count} workers on {plan.device}")
    with scratch_folder("headway-doctor-") as folder:
        write_json(folder / "plan.json", asdict(plan))
        try:
            start_workers(count, folder, {}, "headway.lab.doctor.communication_worker", str(folder))
        except WorkersFailed as error:
            raise _recorded_error(folder) or _death_error(folder, error) from None
        except WorkersStopped as error:
            if error.signal == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise CommunicationFailed(str(error)) from None
        return TypeAdapter(Communication).validate_json((folder / "result.json").read_bytes())


def _recorded_error(folder: Path) -> CommunicationFailed | None:
    """Return the error of a worker that failed for its own reason."""
    records: list[dict[str, Any]] = [json.loads(path.read_bytes()) for path in sorted(folder.glob("error-*.json"))]
    own = [record for record in records if "lost the others" not in record["what"]]
    if not own:
        return None
    error = CommunicationFailed(own[0]["what"], where=own[0]["where"], fix=own[0]["fix"])
    error.exit_code = own[0]["exit_code"]
    return error


def _death_error(folder: Path, error: WorkersFailed) -> CommunicationFailed:
    # workers that lost a killed one may be noticed before it
    rank = error.first.rank
    how = in_words(error.first.code)
    log = folder / f"worker-{rank}.log"
    last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:] if log.exists() else []
    return CommunicationFailed(
        f"worker {rank} died ({how}) while it was measuring{f': {last[0]}' if last else ''}",
        where=f"worker {rank}",
        fix="signal 9 usually means that the kernel ran out of memory: see dmesg, or use smaller --sizes",
    )
