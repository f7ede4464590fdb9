"""Programs of clusters (`kubectl`, `sbatch`, `sky`), driven as a person would, so that contexts and plug-ins work."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.core.errors import ConfigError
from headway.core.files.foreign import parse_json

_SECONDS = 120.0


def ask_program(words: Sequence[str], *, stdin: str | None = None, seconds: float = _SECONDS) -> str:
    """Run a program to its end and return what it prints.

    Args:
        words: The command.
        stdin: What it reads; a secret goes here, never onto a command line.
        seconds: Longest time that it may take.

    Raises:
        ConfigError: it is not installed, takes too long, or fails.
    """
    done = try_program(words, stdin=stdin, seconds=seconds)
    if done.returncode:
        raise ConfigError(
            f"{words[0]} refused: {last_words(done)}",
            where=shlex.join(words),
            fix="correct what it names; the command can be tried by hand",
        )
    return done.stdout


def try_program(
    words: Sequence[str],
    *,
    stdin: str | None = None,
    seconds: float = _SECONDS,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, whatever its exit code.

    Args:
        words: The command.
        stdin: What it reads.
        seconds: Longest time that it may take.
        folder: Where it runs; here if None.
        environment: All of its variables; those of this process if None.

    Raises:
        ConfigError: it is not installed, or takes too long.
    """
    try:
        # Without a terminal: a program that asks a question would wait for an answer forever.
        source: dict[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
        return subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            cwd=folder,
            env=environment,
            **source,
        )
    except OSError as error:
        raise _missing(words[0], error) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{words[0]} has not answered for {seconds:.0f} seconds",
            where=shlex.join(words),
            fix="check that what it asks can be reached, and run the same command again",
        ) from None


def last_words(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line that a failed program has printed, or its exit code if it was silent."""
    said = (done.stderr or done.stdout).strip().splitlines()
    return said[-1].strip() if said else f"exit code {done.returncode}"


def ask_json(words: Sequence[str]) -> Any:
    """Run a program and return the JSON value that it prints.

    Raises:
        ConfigError: as `ask_program`; it prints something else.
    """
    return parse_answer(words, ask_program(words))


def parse_answer(words: Sequence[str], text: str) -> Any:
    """Return the JSON value that a program has printed.

    Args:
        words: The command.
        text: What it has printed.

    Raises:
        ConfigError: it is not JSON.
    """
    try:
        return parse_json(text)
    except ValueError:
        raise ConfigError(
            f"{words[0]} did not answer in JSON", where=shlex.join(words), fix="check its version"
        ) from None


def show_program(words: Sequence[str]) -> int:
    """Run a program whose output is for the user, as logs are, and return its exit code.

    Raises:
        ConfigError: it is not installed.
    """
    sys.stdout.flush()
    try:
        return subprocess.run(words, check=False).returncode
    except OSError as error:
        raise _missing(words[0], error) from None


def show_pod_logs(
    kubectl: Sequence[str], namespace: Sequence[str], selector: str, container: str | None, follow: bool
) -> int:
    """Print the output of a container of all pods, each line with the name of its pod; return kubectl's exit code.

    Args:
        kubectl: The first words of its command.
        namespace: Its option for the namespace.
        selector: Labels of the pods.
        container: Name of the container; None for all.
        follow: Wait for more.

    Raises:
        ConfigError: kubectl is not installed.
    """
    chosen = "--all-containers" if container is None else f"--container={container}"
    options = ["--prefix", "--tail=-1", "--max-log-requests=64", chosen]
    return show_program([*kubectl, "logs", *namespace, "--selector", selector, *options, *(["--follow"] * follow)])


def kubectl_of(context: str | None) -> list[str]:
    """Return the first words of a command of kubectl."""
    return ["kubectl", *([] if context is None else [f"--context={context}"])]


def checked_kubectl(context: str | None) -> list[str]:
    """Return the first words of a command of kubectl, which knows the context.

    Raises:
        ConfigError: it does not.
    """
    if context is None:
        return kubectl_of(None)
    known = ask_program(["kubectl", "config", "get-contexts", "--output=name"]).split()
    if context not in known:
        raise ConfigError(
            f"kubectl has no context '{context}'",
            where="launch.kubernetes.context",
            fix=f"one of: {', '.join(known) or 'none; get credentials of the cluster first'}",
        )
    return kubectl_of(context)


def check_kind(kubectl: Sequence[str], kind: str, resource: str, where: str, install: str) -> None:
    """Check that a cluster knows a kind of object that a controller brings.

    Args:
        kubectl: The first words of its command.
        kind: The kind.
        resource: Its name for kubectl.
        where: What asks for it.
        install: How to install its controller.

    Raises:
        ConfigError: it does not.
    """
    asked = try_program([*kubectl, "get", "customresourcedefinition", resource, "--output=name"])
    if asked.returncode and "NotFound" in asked.stderr:
        raise ConfigError(f"the cluster does not know the kind {kind} ({resource})", where=where, fix=install)


def _missing(program: str, error: OSError) -> ConfigError:
    if not isinstance(error, FileNotFoundError):
        what = f"the program '{program}' cannot be started: {error.strerror or error}"
        return ConfigError(what, where="PATH", fix=f"check the installation of {program}")
    return ConfigError(
        f"there is no program '{program}'",
        where="PATH",
        fix=f"install {program} where you run this; --dry-run of a launch writes the files without it",
    )
