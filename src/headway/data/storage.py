"""The storage client for data: errors in the words of a remote file or token store.

A file shorter than when it was listed is an error, since half a document must not pass for a whole one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.core.errors import DataError, HeadwayError
from headway.core.storage import ObjectInfo, Problem, Storage, credentials_fix, missing_fix

_CHANGED = "prepare again when the file no longer changes"


class MissingError(DataError):
    """There is no such file, or no longer."""


class UnreachableError(DataError):
    """A remote store does not answer, or fails temporarily."""


class DataStorage(Storage):
    """Files of a data source, or of a remote token store.

    A request is tried four times, within seconds, and then for as long as patience lasts.
    """

    purpose = "reading"
    tries = 4

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        super().__init__(url, options, patience_seconds=0.0)

    def describe(self, name: str = "") -> ObjectInfo:
        """Return the present size and version of a file.

        Raises:
            DataError: the file is gone, or cannot be reached.
        """
        found = self.stat(name)
        if found is None:
            raise self.explain("missing", self.url_of(name), "")
        return found

    def explain(self, problem: Problem, url: str, reason: str) -> HeadwayError:
        """Return the error for a problem with a file."""
        match problem:
            case "missing":
                return MissingError("there is no such remote file, or no longer", where=url, fix=missing_fix(url))
            case "credentials":
                what = f"the remote store does not let us in: {reason}"
                return DataError(what, where=url, fix=credentials_fix(url))
            case "unsized":
                what = "the server does not report the file's length"
                return DataError(what, where=url, fix="download it, and name the copy")
            case "short":
                return DataError(f"the remote file {reason}: it changed, or was cut short", where=url, fix=_CHANGED)
            case "long":
                return DataError(f"the remote file {reason}: it changed", where=url, fix=_CHANGED)
            case "large":
                return DataError(f"the remote store is damaged: {reason}", where=url, fix="upload it again")
            case _:
                return (UnreachableError if problem == "unreachable" else DataError)(
                    f"the remote store cannot be read: {reason}",
                    where=url,
                    fix="check the network and storage_options, and retry",
                )
