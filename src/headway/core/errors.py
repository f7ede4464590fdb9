"""Errors that a person can act on: what is wrong, where, and what to do.

Every error that Headway raises on purpose is a `HeadwayError`. The command line prints it in three lines and exits
with its code, so a scheduler can tell a typing mistake from a full disk or a preemption.
"""

from __future__ import annotations

from headway.core.format import printable
from headway.core.secrets import redact

#: The exit code of Ctrl-C, as shells have it.
INTERRUPTED = 130


class HeadwayError(Exception):
    """Base of all deliberate errors.

    Args:
        what: One sentence on what is wrong.
        where: File, line, key, document or shard.
        fix: What to do about it, preferably a command.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        # Redacted here, since the parts go to the screen, into logs and records, and to other processes.
        self.what = redact(what)
        self.where, self.fix = (text and redact(text) for text in (where, fix))
        super().__init__(self.render())

    def render(self) -> str:
        """The three-line form shown to people; parts that are unknown are left out.

        Names and texts of others that are in it cannot steer a terminal, nor begin a line as if it were another error.
        """
        first, *more = printable(self.what, keep="\n").split("\n")
        lines = [f"error: {first}", *(line if line[:1] == " " else f"    {line}" for line in more)]
        if self.where:
            lines.append(f"  where: {printable(self.where)}")
        if self.fix:
            lines.append(f"  fix:   {printable(self.fix)}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions with keyword arguments do not survive the trip between worker processes by themselves.
        return (_rebuild, (type(self), self.what, self.where, self.fix))


def _rebuild(kind: type[HeadwayError], what: str, where: str | None, fix: str | None) -> HeadwayError:
    return kind(what, where=where, fix=fix)


class ConfigError(HeadwayError):
    """The command or the config is wrong; nothing has been touched."""

    exit_code = 2


class DataError(HeadwayError):
    """Text, tokenizer or token store cannot be used."""

    exit_code = 3


class CheckpointError(HeadwayError):
    """A checkpoint or run directory cannot be written, read or trusted."""

    exit_code = 4


class DivergedError(HeadwayError):
    """Training produced too many non-finite steps in a row."""

    exit_code = 5


class CorruptionError(HeadwayError):
    """Hardware has computed or kept something wrongly; nothing of it was saved."""

    exit_code = 1


class Preempted(HeadwayError):
    """The machine was taken away; the state is saved and the same command goes on from it."""

    exit_code = 75


def missing_extra(package: str, extra: str, purpose: str) -> ConfigError:
    """The error for an optional dependency that is not installed."""
    return ConfigError(
        f"{purpose} needs the package '{package}', which is not installed.",
        fix=f"pip install 'headway[{extra}]'",
    )


def error_with(exit_code: int) -> type[HeadwayError] | None:
    """The kind of error that ends a process with this code, if there is one for it alone."""
    kinds = {kind.exit_code: kind for kind in (ConfigError, DataError, CheckpointError, DivergedError, Preempted)}
    return kinds.get(exit_code)
