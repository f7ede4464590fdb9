"""A CUDA device in host memory (`emulated_cuda.cpp`), and what of `torch.cuda` goes with it.

`environment()` is for programs that are to have one: what is in this folder is imported by Python when it starts.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

#: Where a program that is to have the device finds the library.
VARIABLE = "HEADWAY_TESTS_EMULATED_CUDA"
_HERE = Path(__file__).parent
_NAME = "NVIDIA H100 80GB HBM3"
_GIB = 2**30


def environment() -> dict[str, str] | None:
    """Variables of programs that are to have the device; None where there is no compiler for it."""
    library = _build()
    if library is None:
        return None
    path = [str(_HERE), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, VARIABLE: str(library), "PYTHONPATH": os.pathsep.join(filter(None, path))}


def begin() -> None:
    """Give this process the device; before anything else imports PyTorch."""
    assert "torch" not in sys.modules, "PyTorch has looked for CUDA already"
    _patch(ctypes.CDLL(os.environ[VARIABLE], os.RTLD_NOW | os.RTLD_GLOBAL))


def _build() -> Path | None:
    """Compile the library, once for each PyTorch and source."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    spec = find_spec("torch")
    if compiler is None or spec is None or spec.origin is None:
        return None
    torch, source = Path(spec.origin).parent, _HERE / "emulated_cuda.cpp"
    version = (torch / "version.py").read_bytes()
    key = hashlib.sha256(source.read_bytes() + version + str(torch).encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"headway-tests-{os.getuid()}-emulated-cuda-{key}.so"
    if not library.exists():
        made = library.with_suffix(f".{os.getpid()}")
        command = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", str(source), "-o", str(made)]
        command += [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
        command += [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
        subprocess.run(command, check=True, timeout=800)
        made.replace(library)
    return library


class Stream:
    """One of which all work is done at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        import torch

        self.device = torch.device("cuda", 0)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        """Nothing is under way."""

    def wait_stream(self, other: Stream) -> None:
        """Nor there."""

    def wait_event(self, event: Event) -> None:
        """Nor before that."""

    def record_event(self, event: Event | None = None) -> Event:
        """All is done."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """All is done."""
        return True


class Event:
    """A moment."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.seconds = 0.0

    def record(self, _: Stream | None = None) -> None:
        """Now."""
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        """It is over."""

    def wait(self, _: Stream | None = None) -> None:
        """It is over."""

    def query(self) -> bool:
        """It is over."""
        return True

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds."""
        return 1e3 * (other.seconds - self.seconds)


class _Runtime:
    """What is asked of CUDA's own library."""

    cudaError = SimpleNamespace(success=0)

    def cudaHostRegister(self, *_: int) -> int:
        return 0

    def cudaHostUnregister(self, *_: int) -> int:
        return 0


def pinned_bytes() -> int:
    """Pinned host memory, in this process."""
    count = ctypes.CDLL(os.environ[VARIABLE]).emulated_pinned_bytes
    count.restype = ctypes.c_int64
    return int(count())


def _patch(library: ctypes.CDLL) -> None:
    import torch
    import torch.cuda.memory

    cuda, generator = torch.cuda, torch.random.default_generator
    properties = SimpleNamespace(
        name=_NAME, major=9, minor=0, total_memory=80 * _GIB, multi_processor_count=132, uuid="emulated"
    )
    answers: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "_is_compiled": True, "device_count": 1, "current_device": 0,
        "get_device_name": _NAME, "get_device_capability": (9, 0), "get_device_properties": properties,
        "is_bf16_supported": True, "mem_get_info": (79 * _GIB, 80 * _GIB), "memory_stats": {}, "cudart": _Runtime(),
        "_lazy_init": None, "init": None, "set_device": None, "synchronize": None, "empty_cache": None,
        "memory_reserved": 0, "max_memory_reserved": 0, "set_per_process_memory_fraction": None,
    }  # fmt: skip
    counts = {
        "memory_allocated": library.emulated_device_bytes,
        "max_memory_allocated": library.emulated_device_peak_bytes,
        "reset_peak_memory_stats": library.emulated_device_reset_peak,
    }
    library.emulated_device_bytes.restype = library.emulated_device_peak_bytes.restype = ctypes.c_int64
    for place in (cuda, torch.cuda.memory):
        for name, answer in answers.items():
            if place is cuda or hasattr(place, name):
                setattr(place, name, lambda *_, answer=answer, **__: answer)
        for name, count in counts.items():
            setattr(place, name, lambda *_, count=count, **__: count())
    cuda.default_generators = (generator,)
    cuda.manual_seed = cuda.manual_seed_all = generator.manual_seed  # type: ignore[assignment]
    cuda.Stream, cuda.Event = Stream, Event  # type: ignore[misc, assignment]
    cuda.current_stream = cuda.default_stream = Stream  # type: ignore[assignment]
    cuda.stream = lambda stream: stream or Stream()  # type: ignore[assignment, return-value]
    # PyTorch's compiler imports these where there is CUDA; on this device nothing can be compiled.
    for missing in ("_cuda_getCurrentRawStream", "_cuda_getDevice"):
        if not hasattr(torch._C, missing):
            setattr(torch._C, missing, lambda *_: 0)
