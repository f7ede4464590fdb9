"""The bandwidth of AdamW updates in host memory: measured by `headway doctor`, kept for `headway plan`.

Run as a program it prints one measurement. Threads of a measurement stay in their process, so it has one of its own.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from headway.core.files.atomic import write_json
from headway.core.files.foreign import as_number, read_json_or_empty
from headway.core.files.paths import user_cache
from headway.core.machine.cores import usable_cores
from headway.core.machine.processor import cpu_name

#: Elements of a measurement; its four tensors are larger than the caches of a processor.
_ELEMENTS = 2**25
#: Bytes that an update of one element moves: weight and both moments read and written, the gradient read; all in fp32.
_BYTES_PER_ELEMENT = 28
_REPEATS = 5
_LIMIT_SECONDS = 120.0


def measure_host_updates() -> float | None:
    """Measure and keep the bytes per second of AdamW updates with all usable cores; None if PyTorch cannot run."""
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=True)
        rate = float(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    with suppress(OSError):  # it costs another measurement
        _file().parent.mkdir(parents=True, exist_ok=True)
        write_json(_file(), {**_identity(), "bytes_per_second": rate})
    return rate


def kept_host_updates() -> float | None:
    """Return the kept bytes per second of updates; None if none were measured with these cores."""
    kept = read_json_or_empty(_file())
    rate = as_number(kept.get("bytes_per_second"))
    is_same = all(kept.get(key) == value for key, value in _identity().items())
    return rate if is_same and rate is not None and rate > 0 else None


def _identity() -> dict[str, object]:
    """Return what a figure holds for: it may lie in a home folder that several machines share."""
    return {"processor": cpu_name(), "cores": usable_cores()}


def _file() -> Path:
    return user_cache() / "host-updates.json"


def _measured() -> float:
    """Return the bytes per second of the fastest of a few updates."""
    import torch

    torch.set_num_threads(usable_cores())
    parameter = torch.nn.Parameter(torch.ones(_ELEMENTS))
    parameter.grad = torch.ones(_ELEMENTS)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()  # makes the moments
    seconds = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    return _ELEMENTS * _BYTES_PER_ELEMENT / min(seconds)


if __name__ == "__main__":
    sys.stdout.write(str(_measured()))
