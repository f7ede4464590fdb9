"""The storage client for checkpoints: errors in the words of a checkpoint's store."""

from __future__ import annotations

from headway.core.errors import CheckpointError, ConfigError, HeadwayError
from headway.core.storage import Problem, Storage, credentials_fix


class NoAnswer(CheckpointError):
    """The store gave no answer, so an object must not be treated as damaged or missing."""


class UnreachableError(NoAnswer):
    """The store does not answer, or not properly, for a reason that may be transient."""


class GivenUp(NoAnswer):
    """A retry ended because the program ends."""


class Objects(Storage):
    """The objects below one URL.

    Errors are a `ConfigError` for denied access, an `UnreachableError` when patience is over, and a `CheckpointError`
    for anything else.
    """

    purpose = "keeping checkpoints at"

    def explain(self, problem: Problem, url: str, reason: str) -> HeadwayError:
        """Return the error for a problem with an object."""
        match problem:
            case "credentials":
                return ConfigError(f"the store denies access: {reason}", where=url, fix=credentials_fix(url))
            case "unreachable":
                fix = "check the network, checkpoint.remote.url and checkpoint.remote.options"
                return UnreachableError(f"the store cannot be reached: {reason}", where=url, fix=fix)
            case "incomplete":
                fix = "the upload is repeated automatically; if this happens again, check the store"
                return UnreachableError(reason, where=url, fix=fix)
            case "stopped":
                return GivenUp("the upload is not finished", where=url, fix="the next attempt continues it")
            case "missing":  # a missing object is no error, so this is its bucket, container or folder
                what = f"there is no such bucket, container or folder: {reason}"
                return CheckpointError(what, where=url, fix="make it, or check checkpoint.remote.url")
            case "large":
                fix = "no run has written it like this: inspect it, and remove it if it is not needed"
                return CheckpointError(reason, where=url, fix=fix)
            case _:
                what = f"the store cannot be used: {reason}"
                return CheckpointError(what, where=url, fix="check checkpoint.remote.url")
