"""Errors of datasets from the Hugging Face Hub, each turned into one `DataError` that says what to do."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from headway.config.sections.data import SourceConfig
from headway.core.errors import DataError, causes, refusal
from headway.core.storage import credentials_fix, kind_of
from headway.text.reading.records import fields_there

# No write permission, or no folder to write to. Failed connections have other numbers.
_DISK = {errno.EACCES, errno.ENOTDIR}
_OFFLINE = "connect to the network; what is in the local cache can be read without it under HF_HUB_OFFLINE=1"


def lacking(kind: str, wanted: str, present: Sequence[str], where: str) -> DataError:
    """Return the error for a subset, split or revision that a dataset lacks; it names the nearest match."""
    return DataError(
        f"the dataset has no {kind} '{wanted}'{fields_there(wanted, present)}",
        where=where,
        fix=f"set the source's {kind}" if kind != "revision" else "name one of these, or a commit, behind the @",
    )


def hub_error(config: SourceConfig, error: Exception, begun: bool = False) -> DataError:
    """Return the error for an exception that `datasets` raised.

    Args:
        config: The source.
        error: The exception. The message quotes its root cause; the other causes only add context.
        begun: Whether the dataset has been found and its files are being fetched.
    """
    chain = list(causes(error))
    words = _in_line(chain[-1])
    if any(kind.__name__ == "DatasetNotFoundError" for cause in chain for kind in type(cause).__mro__):
        return _not_found(config, _in_line(error))
    for cause in chain:
        if isinstance(cause, OSError) and (cause.errno in _DISK or refusal(cause) is not None):
            what = f"the dataset cannot be put into the local cache: {cause.strerror}"
            fix = "free space there, or set HF_HOME to a folder on another disk; or set streaming, which needs no cache"
            return DataError(what, where=str(cause.filename or config.path), fix=fix)
    if any(kind_of(cause)[0] == "credentials" for cause in chain):
        what = f"the Hugging Face Hub does not let us in: {words}"
        return DataError(what, where=config.path, fix=credentials_fix(config.path))
    # `datasets` reports some network errors only in the message.
    in_message = any(part in words for part in ("LocalEntryNotFoundError", "in the cache"))
    if in_message or any(_is_network_error(cause) for cause in chain):
        return _unreachable(config, words, begun)
    files = f"its files, as in hf://datasets/{config.path.removeprefix('hf://')}/**/*.parquet"
    if begun:
        what = f"the dataset cannot be read: {words}"
        fix = f"name {files}: then each is read by itself, and data.bad_documents: skip skips damaged ones"
    else:
        what = f"the dataset cannot be loaded: {words}"
        fix = f"check the source's path, subset and split; or name {files}"
    return DataError(what, where=config.path, fix=fix)


def _is_network_error(error: BaseException) -> bool:
    """Return whether a connection failed. The errors of decompressors do not count; they have no errno."""
    if type(error).__module__ in ("builtins", "gzip") and not isinstance(error, ConnectionError | TimeoutError):
        return isinstance(error, OSError) and error.errno is not None and kind_of(error)[0] == "unreachable"
    return kind_of(error)[0] == "unreachable"


def _unreachable(config: SourceConfig, words: str, begun: bool) -> DataError:
    if begun:
        what = f"the Hugging Face Hub no longer answers: {words}"
        fix = "run the same command again when it does; finished work is kept"
    elif "configurations in the cache" in words:
        what = f"the Hugging Face Hub cannot be reached, and the local cache has several subsets: {words}"
        fix = "set the source's subset"
    else:
        what = f"the Hugging Face Hub cannot be reached, and the dataset is not in the local cache: {words}"
        fix = f"{_OFFLINE}, each subset by itself; or save_to_disk it elsewhere, and name that folder"
    return DataError(what, where=config.path, fix=fix)


def _in_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400] or type(error).__name__


def _not_found(config: SourceConfig, words: str) -> DataError:
    if "gated" in words:
        what = f"the dataset is gated, and access is denied: {words}"
        return DataError(what, where=config.path, fix=credentials_fix(config.path))
    if words.startswith("Revision"):
        return DataError(f"there is no such revision: {words}", where=config.path, fix="check what is behind the @")
    what = "there is no such dataset on the Hugging Face Hub, or it is private"
    return DataError(what, where=config.path, fix=credentials_fix(config.path))
