"""Where a run comes from: the contents of `run.json`, enough to ask years later what exactly was run."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from headway.core.files import sha256_file
from headway.telemetry.hardware import hardware_facts

#: Most of a diff that is kept as text; its SHA-256 always covers the whole of it.
_DIFF_BYTES = 1_000_000

_GIT_SECONDS = 30

_PACKAGES = (
    "headway", "torch", "numpy", "safetensors", "tokenizers", "pydantic", "psutil", "triton", "transformers",
    "pyarrow", "zstandard", "matplotlib", "deepspeed", "ray",
)  # fmt: skip

_VERSION = re.compile(r"^Version: *(\S+)", re.MULTILINE)

#: Environment variables that may be recorded. Everything else stays private.
_VARIABLES = re.compile(
    r"(OMP|MKL|KMP|OPENBLAS|ONEDNN|DNNL|CUDA|CUBLAS|CUDNN|NCCL|GLOO|TORCH|TORCHINDUCTOR|TORCHDYNAMO|PYTORCH|ATEN|TRITON"
    r"|HIP|ROCR|HEADWAY)_\w+"
    r"|NVIDIA_TF32_OVERRIDE|PYTHONHASHSEED|TOKENIZERS_PARALLELISM|WORLD_SIZE|LOCAL_WORLD_SIZE|SLURM_JOB_ID|LD_PRELOAD"
)

#: Not even when the name is allowed.
_SECRETS = re.compile(r"(^|_)(TOKEN|API_?KEY|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?|AUTH)(_|$)", re.IGNORECASE)


def provenance(
    *,
    command: Sequence[str],
    config_fingerprint: str,
    fingerprints: Mapping[str, str],
    model: Mapping[str, Any] | None = None,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Everything that `run.json` records, ready for JSON.

    Args:
        command: The command line, as a list.
        config_fingerprint: Of the config's identity.
        fingerprints: Of what the run uses: "data" (the token store's manifest) and "tokenizer".
        model: Facts on the model that the config does not tell, e.g. "parameters" and "vocab_size".
        folder: Whose git repository is described; the working directory when not given.
    """
    folder = folder or Path.cwd()
    return {
        "created": round(time.time(), 3),
        "command": list(command),
        "folder": str(folder),
        "fingerprints": {"config": config_fingerprint, **fingerprints},
        "model": dict(model or {}),
        "git": git_state(folder),
        "environment": environment(),
        "hardware": hardware_facts(),
    }


def environment() -> dict[str, Any]:
    """Python, platform, package versions, and the environment variables that change what is computed."""
    import torch

    cudnn: Any = torch.backends.cudnn
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": dict(sorted(_versions())),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": cudnn.version() if cudnn.is_available() else None,
        "variables": {name: value for name, value in sorted(os.environ.items()) if _may_be_told(name)},
    }


def _versions() -> list[tuple[str, str]]:
    # Not `metadata.version`, which reads the whole text as mail: a sixtieth of a second of every start for all packages
    # together.
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


def _may_be_told(name: str) -> bool:
    return _VARIABLES.fullmatch(name) is not None and _SECRETS.search(name) is None


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit and uncommitted changes of the repository that holds `folder`.

    Returns:
        None without git or outside a repository; else `commit` (None before the first one), `branch`, `dirty`, `diff`
        (text, at most 1 MB), `diff_bytes`, `diff_sha256` (of the whole diff) and `untracked` (up to 100 paths).
    """
    if _git(folder, "rev-parse", "--is-inside-work-tree") != "true":
        return None
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    untracked = (_git(folder, "ls-files", "--others", "--exclude-standard") or "").splitlines()
    changes = _diff(folder) if commit else {}
    return {
        "commit": commit,
        "branch": _git(folder, "symbolic-ref", "--short", "HEAD"),
        "dirty": bool(changes or untracked),
        **changes,
        "untracked": untracked[:100],
    }


def _diff(folder: Path) -> dict[str, Any]:
    """Changes against HEAD; empty when there are none, or when git does not answer in time."""
    with tempfile.NamedTemporaryFile(prefix="headway-diff-") as file:
        # No text conversion and no external diff tools: the diff must be one that `git apply` takes.
        command = _git_command(folder, "diff", "HEAD", "--binary", "--no-color", "--no-ext-diff", "--no-textconv")
        try:
            subprocess.run(command, stdout=file, stderr=subprocess.DEVNULL, timeout=_GIT_SECONDS, check=True)
        except (OSError, subprocess.SubprocessError):
            return {}
        path = Path(file.name)
        size = path.stat().st_size
        if not size:
            return {}
        with path.open("rb") as written:
            text = written.read(_DIFF_BYTES).decode(errors="replace")
        return {"diff": text, "diff_bytes": size, "diff_sha256": sha256_file(path)}


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command; None when it fails for whatever reason."""
    try:
        done = subprocess.run(_git_command(folder, *arguments), capture_output=True, timeout=_GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip()


def _git_command(folder: Path, *arguments: str) -> list[str]:
    # `--no-optional-locks`: looking must not get in the way of a person who commits at the same moment.
    return ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments]
