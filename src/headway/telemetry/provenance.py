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
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from headway.core.credentials.secrets import redact, redact_arguments, redact_values
from headway.core.files.atomic import atomic_write
from headway.telemetry.hardware import hardware_facts
from headway.telemetry.variables import recorded_variables

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


def provenance(
    *,
    command: Sequence[str],
    config_fingerprint: str,
    fingerprints: Mapping[str, str],
    model: Mapping[str, Any] | None = None,
    folder: Path | None = None,
    git_diff: GitDiff = "none",
    keep: Path | None = None,
) -> dict[str, Any]:
    """Return everything that `run.json` records, ready for JSON, without credentials.

    Args:
        command: The command line, as a list.
        config_fingerprint: Fingerprint of the config's identity.
        fingerprints: Fingerprints of what the run uses: "data" (the token store's manifest) and "tokenizer".
        model: Facts about the model that are not in the config, e.g. "parameters" and "vocab_size".
        folder: A folder in the git repository to describe; the working directory if not given.
        git_diff: How much of uncommitted changes is kept (`telemetry.git_diff`).
        keep: The folder in which they are kept; see `git_state`.
    """
    folder = folder or Path.cwd()
    facts = {
        "created": round(time.time(), 3),
        "command": redact_arguments(command),
        "folder": str(folder),
        "fingerprints": {"config": config_fingerprint, **fingerprints},
        "model": dict(model or {}),
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
