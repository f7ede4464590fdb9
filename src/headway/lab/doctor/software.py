"""Versions of Python, PyTorch with its CUDA and NCCL, the driver, and the optional packages."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from headway.core.requirements import NAME, by_extra, extra_requirements, requirements
from headway.lab.doctor.findings import Finding
from headway.parallel.interconnect import Interconnect
from headway.telemetry.gpus import Driver

#: The oldest driver for each CUDA version, which also runs its minor versions (CUDA Compatibility, "Minor Version
#: Compatibility", table 1).
_OLDEST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}

#: Extras that combine others.
_COLLECTIONS = ("all", "dev")


@dataclass(frozen=True)
class TorchFacts:
    """The installed PyTorch."""

    version: str
    cuda: str | None
    """CUDA version that it was built for; None for the CPU only."""
    nccl: str | None = None
    architectures: tuple[str, ...] = ()
    """GPU architectures with kernels: "sm_90", or "compute_90" (PTX for newer ones, compiled at start)."""
    sees_gpus: bool | None = None
    """Whether it can use a GPU; None if not checked."""


@dataclass(frozen=True)
class Software:
    """The installed software."""

    python: tuple[int, int, int]
    torch: TorchFacts | None
    version_of: Callable[[str], str | None]
    """Returns the version of a package; None if it is not installed."""
    requirements: Sequence[str]
    """Requirements of the Headway package."""


def read_software(*, ask_torch: bool) -> Software:
    """Look up the installed software.

    Args:
        ask_torch: Import PyTorch, which takes seconds, for facts about GPUs that only it knows.
    """
    torch = _imported_torch() if ask_torch else _torch_on_disk()
    return Software(sys.version_info[:3], torch, _version_of, requirements())


def examine_versions(software: Software) -> Iterator[Finding]:
    """Examine Python, PyTorch and the optional packages."""
    python = ".".join(map(str, software.python))
    level, fix = ("ok", None) if software.python >= (3, 11) else ("error", "install Python 3.11 or 3.12")
    yield Finding("ok" if level == "ok" else "error", f"Python {python}", sys.executable, fix)
    yield from _torch(software)
    yield from _extras(software)


def examine_cuda(software: Software, driver: Driver, found: Interconnect) -> Iterator[Finding]:
    """Examine whether PyTorch, CUDA, the driver and the GPUs are compatible, and the version of NCCL."""
    torch = software.torch
    if torch is None or not driver.gpus:
        return
    where = f"torch {torch.version}, driver {driver.version or 'unknown'}"
    if torch.cuda is None:
        yield Finding(
            "error",
            "there are GPUs, but this PyTorch is built for the CPU only",
            where,
            "install the build for CUDA",
            "pip install --force-reinstall torch  (see pytorch.org for the index of your CUDA)",
        )
        return
    major = int(torch.cuda.split(".")[0])
    oldest = _OLDEST_DRIVER.get(major)
    runs = driver.cuda and int(driver.cuda.split(".")[0])
    if runs and runs < major:
        yield Finding(
            "error",
            f"PyTorch is built for CUDA {torch.cuda}, and the driver runs CUDA {driver.cuda} at most",
            where,
            f"install driver {oldest} or newer" if oldest else "install a newer driver",
            f"or: pip install torch for CUDA {runs} (see pytorch.org for its index)",
        )
        return
    yield Finding("ok", f"CUDA {torch.cuda} on driver {driver.version} (which runs up to {driver.cuda})", where)
    if torch.sees_gpus is False:
        yield Finding(
            "error",
            "PyTorch sees none of the GPUs that nvidia-smi lists",
            "torch.cuda.is_available()",
            "see CUDA_VISIBLE_DEVICES; after a driver update reboot; in a container start it with the GPUs",
            "python -c 'import torch; torch.cuda.init()'",
        )
    yield from _kernels(torch, found)
    if torch.nccl:
        yield Finding("ok", f"NCCL {torch.nccl}", "torch.cuda.nccl.version()")


def _kernels(torch: TorchFacts, found: Interconnect) -> Iterator[Finding]:
    """Check for kernels that run on the GPUs.

    Machine code runs on GPUs of its major version from its minor version on, PTX on all newer ones.
    """
    capability = found.compute_capability
    if capability is None or not torch.architectures:
        return
    wanted = round(capability * 10)
    pairs = [match.groups() for name in torch.architectures if (match := re.match(r"(sm|compute)_(\d+)", name))]
    runs = any(
        int(number) <= wanted if kind == "compute" else int(number) // 10 == wanted // 10 and int(number) <= wanted
        for kind, number in pairs
    )
    if not runs:
        yield Finding(
            "error",
            f"this PyTorch has no kernels for compute capability {capability}",
            f"torch.cuda.get_arch_list(): {', '.join(torch.architectures)}",
            "install a build that has them, or use other GPUs",
        )


def _torch(software: Software) -> Iterator[Finding]:
    wanted = next((text for text in software.requirements if re.match(r"torch\b", text)), None)
    if software.torch is None:
        yield Finding("error", "PyTorch is not installed", None, "install it", f'pip install "{wanted or "torch"}"')
        return
    version = software.torch.version
    kind = f"for CUDA {software.torch.cuda}" if software.torch.cuda else "for the CPU only"
    if wanted and not _within(version, wanted):
        yield Finding(
            "error",
            f"PyTorch {version} is outside the versions that Headway is tested with ({wanted})",
            "torch.__version__",
            "install a tested version",
            f'pip install "{wanted}"',
        )
    else:
        yield Finding("ok", f"PyTorch {version}, {kind}", "torch.__version__")


def _extras(software: Software) -> Iterator[Finding]:
    missing: dict[str, list[str]] = {}
    there: list[str] = []
    for extra, packages in _packages_by_extra(software.requirements).items():
        absent = [package for package in packages if software.version_of(package) is None]
        if absent:
            missing[extra] = absent
        else:
            there.append(extra)
    if there:
        yield Finding("ok", f"extras installed: {', '.join(there)}", "importlib.metadata")
    for extra, absent in missing.items():
        yield Finding(
            "note",
            f"extra '{extra}' is not installed ({', '.join(absent)})",
            "importlib.metadata",
            "install it when you need it",
            f"python -m pip install {shlex.join(extra_requirements(extra, software.requirements))}",
        )
    if not software.requirements:
        yield Finding("note", "headway runs from its source and is not installed, so its extras are unknown")


def _packages_by_extra(requirements: Sequence[str]) -> dict[str, list[str]]:
    found = {}
    for extra, texts in by_extra(requirements).items():
        names = [name[0] for text in texts if (name := re.match(r"[A-Za-z0-9._-]+", text)) and name[0] != NAME]
        if names and extra not in _COLLECTIONS:
            found[extra] = names
    return found


def _within(version: str, requirement: str) -> bool:
    """Return whether a version fulfils bounds such as "torch>=2.11,<2.14"."""
    number = _numbers(version)
    for sign, bound in re.findall(r"(>=|<)\s*([\d.]+)", requirement):
        limit = _numbers(bound)
        if (number < limit) if sign == ">=" else (number[: len(limit)] >= limit):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0]))


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _torch_on_disk() -> TorchFacts | None:
    """Read version and CUDA of the installed PyTorch from the file that its build writes."""
    try:
        spec = util.find_spec("torch")
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        text = ""
    values = dict(re.findall(r"^(__version__|cuda)\b[^=\n]*=\s*'([^']*)'", text, re.MULTILINE))
    version = values.get("__version__") or _version_of("torch")
    return TorchFacts(version, values.get("cuda")) if version else None


def _imported_torch() -> TorchFacts | None:
    try:
        import torch
    except ImportError:
        return None
    if torch.version.cuda is None:
        return TorchFacts(torch.__version__, None)
    # With a broken driver PyTorch warns and returns False, which is the answer needed here.
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
    return TorchFacts(
        torch.__version__,
        torch.version.cuda,
        ".".join(map(str, nccl)) or None,
        tuple(torch.cuda.get_arch_list()),
        torch.cuda.is_available(),
    )
