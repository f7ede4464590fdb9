"""A repository of the Hugging Face Hub: its name in a config, and its files on this machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard

from headway.core.errors import ConfigError, HeadwayError, causes, in_one_line
from headway.core.requirements import install_command

HUB = "hf://"
_COMMIT = re.compile(r"[0-9a-f]{40}")
#: Endings of files, which names of repositories do not have.
_FILES = (".json", ".jsonl", ".model", ".tiktoken", ".txt", ".yaml")
#: What may be the name of a repository: an organisation and a name.
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")


def is_on_hub(source: Path | str | None) -> TypeGuard[str]:
    """Return whether a source names a repository of the Hugging Face Hub."""
    return isinstance(source, str) and source.startswith(HUB)


def split_hub_name(source: str) -> tuple[str, str | None]:
    """Split `hf://organisation/name@revision` into repository and revision."""
    name, _, revision = source.removeprefix(HUB).partition("@")
    return name, revision or None


def or_on_hub(path: Path | str) -> str:
    """Return words that end a fix with the name on the Hub that a missing path may stand for: `hf://Qwen/Qwen3-0.6B`
    for `Qwen/Qwen3-0.6B`; empty if it is no such name, or if its first part is a folder here."""
    name = str(path)
    if _REPOSITORY.fullmatch(name) is None or Path(name).parent.exists() or Path(name).suffix in _FILES:
        return ""
    return f"; on the Hugging Face Hub its name is {HUB}{name}"


def is_pinned(source: Path | str) -> bool:
    """Return whether a source of the Hub names a commit."""
    return is_on_hub(source) and _COMMIT.fullmatch(split_hub_name(source)[1] or "") is not None


def snapshot(source: str, patterns: Sequence[str]) -> Path:
    """Return the folder of a revision in the local cache, which names it after its commit.

    Args:
        source: `hf://organisation/name@revision`.
        patterns: Globs of the files that must be there; those that are missing are downloaded.

    Raises:
        ConfigError: there is no such model, or the Hub cannot be reached and the cache does not have it.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError(
            "models of the Hugging Face Hub need the package huggingface_hub",
            where=source,
            fix=install_command("hf", "huggingface_hub"),
        ) from None
    name, revision = split_hub_name(source)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except Exception as error:
        raise _explained(source, error) from error


def hub_error_kinds(error: Exception) -> set[str]:
    """Return the names of all classes of an exception of the Hub's client and of its causes; no base is common."""
    return {kind.__name__ for cause in causes(error) for kind in type(cause).__mro__}


def _explained(source: str, error: Exception) -> HeadwayError:
    kinds = hub_error_kinds(error)
    words = in_one_line(error)
    if "GatedRepoError" in kinds:
        what = "the model is gated, and access is denied"
        fix = "accept its terms on the Hub, and set HF_TOKEN"
    elif "RevisionNotFoundError" in kinds:
        what = "the model has no such revision"
        fix = "check what is behind the @"
    elif "RepositoryNotFoundError" in kinds:
        what = "there is no such model on the Hugging Face Hub, or it is private"
        fix = "check its name; set HF_TOKEN"
    elif kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "ConnectError", "TimeoutError"}:
        what = f"the Hugging Face Hub cannot be reached, and the local cache does not have the model: {words}"
        fix = "connect to the network once; or copy the model's folder here, and name that folder"
    else:
        what = f"the model cannot be downloaded: {words}"
        fix = "try again; or name a local folder"
    return ConfigError(what, where=source, fix=fix)
