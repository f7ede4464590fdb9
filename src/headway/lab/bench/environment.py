"""The environment that a result depends on: the hardware, the software, and this package's own source."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import headway
from headway.core.files.hashes import fingerprint
from headway.telemetry.hardware import hardware_facts
from headway.telemetry.provenance import environment

#: Prefixes of variables that may affect speed. Variables that differ at each start have others (`TORCHELASTIC_`).
_VARIABLES = (
    "NCCL_", "GLOO_", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "ATEN_", "ONEDNN_", "DNNL_", "MKL_",
    "KMP_", "OMP_", "CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_TF32_OVERRIDE", "LD_PRELOAD",
)  # fmt: skip
#: Determined by the cell (threads) or covered by other facts (devices, versions), or paths of files.
_OF_NO_MATTER = {
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUDA_VERSION", "CUDA_HOME", "CUDA_PATH",
    "CUDA_CACHE_PATH", "TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR",
}  # fmt: skip


def describe_environment(launcher: str) -> dict[str, Any]:
    """Return hardware, versions, variables that affect speed, and the launcher; equal on equal machines."""
    facts = environment()
    variables = {
        name: value
        for name, value in facts["variables"].items()
        if name.startswith(_VARIABLES) and name not in _OF_NO_MATTER
    }
    packages = {name: facts["packages"].get(name) for name in ("headway", "torch", "numpy", "triton", "deepspeed")}
    return {
        "hardware": hardware_facts(),
        "python": facts["python"],
        "packages": {name: version for name, version in packages.items() if version is not None},
        "cuda": facts["cuda"],
        "variables": variables,
        "launcher": launcher,
        "source": _source(),
    }


def environment_id(environment: dict[str, Any]) -> str:
    """Return a short name for an environment."""
    return fingerprint(environment)[:8]


@cache
def _source() -> str:
    """Return a hash of the package's own code: results of different code must not be mixed."""
    folder = Path(headway.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
