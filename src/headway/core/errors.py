"""Errors that a person can act on: what is wrong, where, and what to do.

Every error that Headway raises on purpose is a `HeadwayError`. The command line prints it in three lines and exits
with its code, so a scheduler can tell a typing mistake from a full disk or a preemption.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headway.core.credentials.secrets import redact
from headway.core.format import printable
from headway.core.requirements import install_command

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
        """Return the three-line form shown to people, without the parts that are unknown.

        Control characters and line breaks in foreign names are escaped, so that they cannot imitate another error.
        """
        first, *more = printable(self.what, keep="\n").split("\n")
        lines = [f"error: {first}", *(line if line[:1] == " " else f"    {line}" for line in more)]
        if self.where:
            lines.append(f"  where: {printable(self.where)}")
        if self.fix:
            lines.append(f"  fix:   {printable(self.fix)}")
        return "\n".join(lines)

    def _render_traceback_(self) -> list[str]:
        """Return what notebooks and IPython show in place of a traceback: the three lines."""
        return self.render().split("\n")

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
    """Hardware has computed or stored wrong values; none of them was saved."""

    exit_code = 1


class Preempted(HeadwayError):
    """The machine was taken away; the state is saved, and the same command continues from it."""

    exit_code = 75


class SavesFailed(CheckpointError):
    """No checkpoint can be saved on this machine; the same command continues on another one, from the newest."""

    exit_code = Preempted.exit_code


class BudgetReached(Preempted):
    """The run has spent its budget; the state is saved, and a larger budget lets it continue."""

    exit_code = 6


class Cancelled(Preempted):
    """The run was stopped on purpose; the state is saved, and no scheduler should start it again by itself."""

    exit_code = 7


#: The errors with an exit code of their own.
DELIBERATE = (ConfigError, DataError, CheckpointError, DivergedError, Preempted, BudgetReached, Cancelled)

#: Errors of the system that mean "this disk takes no more, or fails", each with its description and its fix.
_REFUSALS = {
    errno.ENOSPC: ("there is no room left", "free space there"),
    errno.EDQUOT: ("the quota is used up", "free space there, or have the quota raised"),
    errno.EFBIG: (
        "a file would be larger than is allowed",
        "raise the limit (`ulimit -f` shows it), or use a file system that takes larger files",
    ),
    errno.EROFS: (
        "the file system is read-only",
        "mount it for writing, or use another place; if it was not so before, dmesg says why",
    ),
    errno.EIO: ("the disk has failed", "see what dmesg says of this disk, and use another one if it fails again"),
}
#: How the messages of Rust (safetensors, tokenizers) and Arrow contain the number.
_NUMBER_IN_WORDS = re.compile(r"\((?:os error|errno) ([0-9]+)\)|\[errno ([0-9]+)\]", re.IGNORECASE)
_NO_TEMPORARY_FILES = "No usable temporary directory"


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its chain of causes."""
    while error is not None:
        yield error
        error = error.__cause__


def refusal(error: BaseException) -> int | None:
    """Return the errno of an error, or of one of its causes, if it means that a disk takes no more, or fails."""
    for cause in causes(error):
        found = _NUMBER_IN_WORDS.search(str(cause))
        number = getattr(cause, "errno", None) or (int(found[1] or found[2]) if found else None)
        if number in _REFUSALS:
            return int(number)
    return None


def fix_for(error: OSError, otherwise: str) -> str:
    """Return the fix for an error that occurred while writing.

    Args:
        error: As the system raised it.
        otherwise: The fix for a disk that is full, and for all errors that do not mean that a disk takes no more or
            fails.
    """
    number = refusal(error)
    return otherwise if number in (None, errno.ENOSPC) else _REFUSALS[number][1]


@contextmanager
def explaining_os_errors(kind: type[HeadwayError], what: str, where: Path | str, fix: str) -> Iterator[None]:
    """Turn an error of the system in a block into a deliberate one.

    Args:
        kind: Type of the error to raise.
        what: What is not possible; the system's reason follows.
        where: Place to report.
        fix: As in `fix_for`.

    Raises:
        HeadwayError: of the given kind.
    """
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror or error}", where=str(where), fix=fix_for(error, fix)) from error


def explain_refusal(
    error: BaseException, kind: type[HeadwayError] = HeadwayError, where: str | None = None
) -> HeadwayError | None:
    """Return a deliberate error for one that means that a disk takes no more or fails, that the working directory is
    gone, or that no folder takes temporary files.

    Args:
        error: The error that was raised.
        kind: Type of the error to return, which sets the exit code. A disk that fails gives a plain `HeadwayError`.
        where: Place to report when the error does not name a file.

    Returns:
        None for any other error.
    """
    if isinstance(error, HeadwayError):
        return None
    number = refusal(error)
    if number is None:
        is_lost = any(isinstance(cause, FileNotFoundError) for cause in causes(error))
        lost = lost_working_folder() if is_lost else None  # to which the path was relative
        return lost or _explain_no_temporary_files(error, kind)
    if number == errno.EIO:
        kind = HeadwayError  # the disk may answer the next time, so a supervisor tries again
    words, fix = _REFUSALS[number]
    named = getattr(error, "filename2", None) or getattr(error, "filename", None)
    place = os.fsdecode(named) if isinstance(named, str | bytes | os.PathLike) else where
    return kind(f"{words} ({os.strerror(number)})", where=place, fix=f"{fix}; then run the same command again")


def lost_working_folder() -> ConfigError | None:
    """Return the error of a process whose working directory was removed; None if it exists."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return ConfigError(
            "the working directory does not exist any more",
            where=os.environ.get("PWD"),
            fix="change to a folder that exists, and run the same command again",
        )
    return None


def _explain_no_temporary_files(error: BaseException, kind: type[HeadwayError]) -> HeadwayError | None:
    """Explain that Python found no folder for temporary files; it does not say why it rejected each folder.

    Libraries ask for such a folder while they are imported, so the error may come from any import.
    """
    if not any(isinstance(cause, FileNotFoundError) and _NO_TEMPORARY_FILES in str(cause) for cause in causes(error)):
        return None
    fix = "free space there, or set TMPDIR to a folder that can be written; then run the same command again"
    return kind("no folder takes temporary files", where=os.environ.get("TMPDIR", "/tmp"), fix=fix)


@contextmanager
def explaining_refusals(kind: type[HeadwayError], where: str | None = None) -> Iterator[None]:
    """Turn errors in a block that mean that a disk takes no more or fails into deliberate ones.

    Raises:
        HeadwayError: of the given kind; a plain one if the disk fails.
    """
    try:
        yield
    except Exception as error:
        explained = explain_refusal(error, kind, where)
        if explained is None:
            raise
        raise explained from error


def in_one_line(error: BaseException, most: int = 300) -> str:
    """Return the beginning of what an error of a library says; its type if it says nothing."""
    return " ".join(str(error).split())[:most] or type(error).__name__


def reason_of(error: BaseException) -> str:
    """Return what a deliberate error says, or the type and the text of any other."""
    return error.what if isinstance(error, HeadwayError) else f"{type(error).__name__}: {error}"


def missing_extra(package: str, extra: str, purpose: str) -> ConfigError:
    """Return the error for an optional dependency that is not installed; its fix installs the extra's packages."""
    return ConfigError(
        f"{purpose} needs the package '{package}', which is not installed.",
        fix=install_command(extra, package),
    )


@contextmanager
def needing(package: str, extra: str, purpose: str) -> Iterator[None]:
    """Import an optional dependency in the block.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise missing_extra(package, extra, purpose) from error


def exit_code_of(error: BaseException | None) -> int:
    """Return the exit code of a command that ends with an error; 0 without one."""
    if error is None:
        return 0
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, SystemExit):
        code: object = error.code or 0
    else:
        code = getattr(explain_refusal(error) or error, "exit_code", 1)
    return code if isinstance(code, int) else 1


def error_with(exit_code: int) -> type[HeadwayError] | None:
    """Return the type of error that ends a process with this exit code, if exactly one type does."""
    return {kind.exit_code: kind for kind in DELIBERATE}.get(exit_code)
