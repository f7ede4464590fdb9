"""Provenance of a run: the contents of `run.json`, enough to find out years later what exactly was run."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from headway.core.credentials.secrets import redact, redact_arguments, redact_values
from headway.core.files.atomic import atomic_write
from headway.telemetry.hardware import hardware_facts

#: The name of a diff, in the folder of the attempt that began with it.
DIFF_FILE = "uncommitted.diff"
#: Largest diff that is kept as text in records, and as a file: a larger one is no longer about code. Its SHA-256 always
#: covers all of it.
_TEXT_BYTES = 1_000_000
_FILE_BYTES = 64_000_000
#: Number of changed files, and of untracked files, whose names are recorded.
_NAMES = 100

_GIT_SECONDS = 30

_PACKAGES = (
    "headway", "torch", "numpy", "safetensors", "tokenizers", "pydantic", "psutil", "triton", "transformers",
    "pyarrow", "zstandard", "matplotlib", "deepspeed", "ray",
)  # fmt: skip

GitDiff = Literal["local", "none", "full"]

_VERSION = re.compile(r"^Version: *(\S+)", re.MULTILINE)
_VARIABLES = """
    ATEN_CPU_CAPABILITY HEADWAY_FAULTS LD_PRELOAD LOCAL_WORLD_SIZE NVIDIA_TF32_OVERRIDE PYTHONHASHSEED SLURM_JOB_ID
    TOKENIZERS_PARALLELISM TP_SOCKET_IFNAME WORLD_SIZE
"""
#: By prefix. NCCL's are those of its manual, except names of files:
#: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
_FAMILIES = {
    "CUBLAS": "WORKSPACE_CONFIG",
    "CUBLASLT": "WORKSPACE_SIZE",
    "CUDA": """
        AUTO_BOOST CACHE_DISABLE DEVICE_MAX_CONNECTIONS DEVICE_ORDER DISABLE_PTX_JIT ENABLE_COREDUMP_ON_EXCEPTION
        FORCE_PTX_JIT LAUNCH_BLOCKING MODULE_LOADING MPS_ACTIVE_THREAD_PERCENTAGE SCALE_LAUNCH_QUEUES VERSION
        VISIBLE_DEVICES
    """,
    "DNNL": "DEFAULT_FPMATH_MODE MAX_CPU_ISA PRIMITIVE_CACHE_CAPACITY VERBOSE",
    "GLOO": "SOCKET_IFNAME",
    "HIP": "VISIBLE_DEVICES",
    "KMP": "AFFINITY BLOCKTIME HW_SUBSET LIBRARY SETTINGS TPAUSE",
    "MKL": """
        CBWR DEBUG_CPU_TYPE DYNAMIC ENABLE_INSTRUCTIONS NUM_THREADS NUM_THREADS_LOCAL THREADING_LAYER VERBOSE
    """,
    "NCCL": """
        ALGO ALLOC_P2P_NET_LL_BUFFERS ASYNC_ERROR_HANDLING BLOCKING_WAIT BUFFSIZE CGA_CLUSTER_SIZE CHECKS_DISABLE
        CHECK_POINTERS COLLNET_ENABLE COLLNET_NODE_THRESHOLD COMM_BLOCKING CROSS_NIC CTA_POLICY CUMEM_ENABLE
        CUMEM_HOST_ENABLE DEBUG DEBUG_SUBSYS DESYNC_DEBUG DMABUF_ENABLE GRAPH_MIXING_SUPPORT GRAPH_REGISTER
        IB_ADAPTIVE_ROUTING IB_ADDR_FAMILY IB_ADDR_RANGE IB_AR_THRESHOLD IB_CUDA_SUPPORT IB_DISABLE IB_ECE_ENABLE
        IB_FIFO_TC IB_GID_INDEX IB_HCA IB_MERGE_NICS IB_PCI_RELAXED_ORDERING IB_QPS_PER_CONNECTION IB_RETRY_CNT
        IB_RETURN_ASYNC_EVENTS IB_ROCE_VERSION_NUM IB_SL IB_SPLIT_DATA_ON_QPS IB_TC IB_TIMEOUT IGNORE_CPU_AFFINITY
        LAUNCH_MODE LAUNCH_ORDER_IMPLICIT LAUNCH_RACE_FATAL LEGACY_CUDA_REGISTER LL128_BUFFSIZE LL_BUFFSIZE
        LL_THRESHOLD LOCAL_REGISTER MAX_CTAS MAX_NCHANNELS MAX_NRINGS MAX_P2P_NCHANNELS MEM_SYNC_DOMAIN MIN_CTAS
        MIN_NCHANNELS MIN_NRINGS MIN_P2P_NCHANNELS MNNVL_ENABLE NCHANNELS_PER_NET_PEER NET NETDEVS_POLICY
        NET_DISABLE_INTRA NET_GDR_C2C NET_GDR_LEVEL NET_GDR_READ NET_PLUGIN NET_SHARED_BUFFERS NET_SHARED_COMMS
        NSOCKS_PERTHREAD NTHREADS NVB_DISABLE NVLS_CHUNKSIZE NVLS_ENABLE NVLS_NCHANNELS OOB_NET_ENABLE OOB_NET_IFNAME
        P2P_DIRECT_DISABLE P2P_DISABLE P2P_LEVEL P2P_LL_THRESHOLD P2P_NET_CHUNKSIZE P2P_PXN_LEVEL PROTO PXN_DISABLE
        RAS_ENABLE RUNTIME_CONNECT SET_THREAD_NAME SHM_DISABLE SINGLE_RING_THRESHOLD SOCKET_FAMILY SOCKET_IFNAME
        SOCKET_NTHREADS SOCKET_POLL_TIMEOUT_MSEC SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC TREE_THRESHOLD TUNER_PLUGIN
        UID_STAGGER_RATE UID_STAGGER_THRESHOLD WIN_ENABLE WIN_STRIDE WORK_FIFO_BYTES
    """,
    "OMP": """
        DYNAMIC MAX_ACTIVE_LEVELS NESTED NUM_THREADS PLACES PROC_BIND SCHEDULE STACKSIZE THREAD_LIMIT WAIT_POLICY
    """,
    "ONEDNN": "DEFAULT_FPMATH_MODE MAX_CPU_ISA PRIMITIVE_CACHE_CAPACITY VERBOSE",
    "OPENBLAS": "CORETYPE MAIN_FREE NUM_THREADS VERBOSE",
    "PYTORCH": "ALLOC_CONF CUDA_ALLOC_CONF HIP_ALLOC_CONF JIT NO_CUDA_MEMORY_CACHING NVML_BASED_CUDA_CHECK",
    "ROCR": "VISIBLE_DEVICES",
    "TORCH": """
        ALLOW_TF32_CUBLAS_OVERRIDE BLAS_PREFER_CUBLASLT BLAS_PREFER_HIPBLASLT COMPILE_DEBUG COMPILE_DISABLE
        CPP_LOG_LEVEL CUDA_ARCH_LIST CUDNN_V8_API_DEBUG CUDNN_V8_API_DISABLED DISTRIBUTED_DEBUG LOGS
        NCCL_ASYNC_ERROR_HANDLING NCCL_AVOID_RECORD_STREAMS NCCL_BLOCKING_WAIT NCCL_CUDA_EVENT_CACHE NCCL_DESYNC_DEBUG
        NCCL_DUMP_ON_TIMEOUT NCCL_ENABLE_MONITORING NCCL_ENABLE_TIMING NCCL_HEARTBEAT_TIMEOUT_SEC NCCL_HIGH_PRIORITY
        NCCL_TRACE_BUFFER_SIZE NCCL_USE_COMM_NONBLOCKING NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK NCCL_ZERO_COPY
        SHOW_CPP_STACKTRACES SHOW_DISPATCH_TRACE
    """,
    "TORCHDYNAMO": "CACHE_SIZE_LIMIT DISABLE SUPPRESS_ERRORS VERBOSE",
    "TORCHINDUCTOR": """
        AUTOGRAD_CACHE COMBO_KERNELS COMPILE_THREADS COORDINATE_DESCENT_TUNING CPP_GEMM_THREADS CPP_WRAPPER CUDAGRAPHS
        DETERMINISTIC FORCE_DISABLE_CACHES FREEZING FX_GRAPH_CACHE LAYOUT_OPTIMIZATION MAX_AUTOTUNE MAX_AUTOTUNE_GEMM
        MAX_AUTOTUNE_GEMM_BACKENDS MAX_AUTOTUNE_POINTWISE MAX_FUSION_SIZE PERMUTE_FUSION PERSISTENT_REDUCTIONS
        TRITON_CUDAGRAPHS UNIQUE_KERNEL_NAMES
    """,
    "TRITON": "ALWAYS_COMPILE CACHE_AUTOTUNING DEBUG DISABLE_LINE_INFO F32_DEFAULT INTERPRET PRINT_AUTOTUNING",
}


def provenance(
    *,
    command: Sequence[str],
    config_fingerprint: str,
    fingerprints: Mapping[str, str],
    model: Mapping[str, Any],
    git_diff: GitDiff = "none",
    keep: Path | None = None,
) -> dict[str, Any]:
    """Return everything that `run.json` records, ready for JSON, without credentials.

    Args:
        command: The command line, as a list.
        config_fingerprint: Fingerprint of the config's identity.
        fingerprints: Fingerprints of what the run uses: "data" (the token store's manifest) and "tokenizer".
        model: Facts about the model that are not in the config, e.g. "parameters" and "vocab_size".
        git_diff: How much of uncommitted changes is kept (`telemetry.git_diff`).
        keep: The folder in which they are kept; see `git_state`.
    """
    folder = Path.cwd()
    facts = {
        "created": round(time.time(), 3),
        "command": redact_arguments(command),
        "folder": str(folder),
        "fingerprints": {"config": config_fingerprint, **fingerprints},
        "model": dict(model),
        "git": git_state(folder, git_diff, keep),
        "environment": environment(),
        "hardware": hardware_facts(),
    }
    return dict(redact_values(facts))


def environment() -> dict[str, Any]:
    """Return Python, platform, package versions, and the environment variables that affect results."""
    import torch

    cudnn: Any = torch.backends.cudnn
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": dict(sorted(_versions())),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": cudnn.version() if cudnn.is_available() else None,
        "variables": recorded_variables(),
    }


def _versions() -> list[tuple[str, str]]:
    # Not `metadata.version`, which parses the whole text as mail: 1/60 s of every start for all packages together.
    found = []
    for package in _PACKAGES:
        try:
            distribution = metadata.distribution(package)
        except metadata.PackageNotFoundError:
            continue
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        version = _VERSION.search(text)
        if version is not None:
            found.append((package, version[1]))
    return found


def git_state(folder: Path, diff: GitDiff = "none", keep: Path | None = None) -> dict[str, Any] | None:
    """Return commit and uncommitted changes of the repository that holds `folder`.

    Args:
        folder: Any folder of the repository.
        diff: What is kept of uncommitted changes: nothing at all, their hash and the names of changed files, or the
            text too, redacted.
        keep: The folder that gets the whole diff as `DIFF_FILE`, as it is and for its owner's eyes only, unless that
            would be nothing or too much.

    Returns:
        None without git or outside a repository; else `commit` (None before the first one), `branch` and `dirty`; of a
        diff `diff_bytes`, `diff_sha256` (both of the whole), `changed` (up to 100 paths), `diff_file` (as seen from the
        run directory, when `keep` is an attempt's folder), `diff` (text, at most 1 MB); and `untracked` (up to 100
        paths).
    """
    if _git(folder, "rev-parse", "--is-inside-work-tree") != "true":
        return None
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    untracked = (_git(folder, "ls-files", "--others", "--exclude-standard") or "").splitlines()
    changes = _diff(folder, diff, keep) if commit else {}
    told = {} if diff == "none" else {**changes, "untracked": untracked[:_NAMES]}
    return {
        "commit": commit,
        "branch": _git(folder, "symbolic-ref", "--short", "HEAD"),
        "dirty": bool(changes or untracked),
        **told,
    }


def _diff(folder: Path, wanted: GitDiff, keep: Path | None) -> dict[str, Any]:
    """Return changes against HEAD; empty if there are none, or if git does not answer in time."""
    if wanted == "none":
        return {"changed": changed} if (changed := _git(folder, "diff", "HEAD", "--name-only")) else {}
    with tempfile.TemporaryFile(dir=keep) as file:  # unnamed, so that a killed process does not leave it behind
        # No text conversion and no external diff tools: `git apply` must accept the diff.
        command = _git_command(folder, "diff", "HEAD", "--binary", "--no-color", "--no-ext-diff", "--no-textconv")
        try:
            subprocess.run(command, stdout=file, stderr=subprocess.DEVNULL, timeout=_GIT_SECONDS, check=True)
        except (OSError, subprocess.SubprocessError):
            return {}
        size = os.fstat(file.fileno()).st_size
        if not size:
            return {}
        file.seek(0)
        names = (_git(folder, "diff", "HEAD", "--name-only") or "").splitlines()
        facts = {
            "diff_bytes": size,
            "diff_sha256": hashlib.file_digest(file, "sha256").hexdigest(),
            "changed": names[:_NAMES],
        }
        if wanted == "full":
            file.seek(0)
            facts["diff"] = redact(file.read(_TEXT_BYTES).decode(errors="replace"))
        if keep is not None and size <= _FILE_BYTES:
            file.seek(0)
            with atomic_write(keep / DIFF_FILE, private=True) as target:
                shutil.copyfileobj(file, target)
            facts["diff_file"] = f"{keep.parent.name}/{keep.name}/{DIFF_FILE}"
        return facts


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of a git command; None if it fails for any reason."""
    try:
        done = subprocess.run(_git_command(folder, *arguments), capture_output=True, timeout=_GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip()


def _git_command(folder: Path, *arguments: str) -> list[str]:
    # `--no-optional-locks`: reading must not disturb a person who commits at the same time.
    return ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments]


@cache
def known_variables() -> frozenset[str]:
    """Return the names of all variables that may be recorded."""
    families = (f"{family}_{name}" for family, names in _FAMILIES.items() for name in names.split())
    return frozenset([*_VARIABLES.split(), *families])


def recorded_variables() -> dict[str, str]:
    """Return the variables of the list that are set, with their values redacted."""
    return {name: redact(value) for name, value in sorted(os.environ.items()) if name in known_variables()}
