"""The config that the user's command names, with its overrides, for the commands that messages suggest.

Worker processes inherit it, since what they report is read by the same user.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from headway.core.console import notice
from headway.core.credentials.secrets import redact_argument

#: Holds the words, quoted for a shell.
VARIABLE = "HEADWAY_CONFIG_WORDS"


def remember_config(path: str, overrides: Sequence[str]) -> None:
    """Remember the config of this process's command line, without credentials in overrides.

    A training that another verb has started keeps that verb's config: its own is in a folder that is about to vanish.
    """
    os.environ.setdefault(VARIABLE, config_words(path, overrides))


def config_words(path: str, overrides: Sequence[str]) -> str:
    """Quote a config and its overrides for a shell."""
    return shlex.join([path, *map(redact_argument, overrides)])


def suggest(verb: str, *options: str, unknown: str | None = None) -> str:
    """Return the command `headway VERB` on the user's config with all its overrides.

    Args:
        verb: The verb.
        options: What follows the config; an override takes the place of those of the same key.
        unknown: What stands for a config that is not known, as to a library; by default it is described in words.
    """
    words = os.environ.get(VARIABLE) or unknown
    keys = {option.partition("=")[0] for option in options if "=" in option}
    if words and keys:
        given = shlex.split(words)
        words = shlex.join(word for word in given if "=" not in word or word.partition("=")[0] not in keys)
    command = " ".join(["headway", verb, *([words] if words else []), *options])
    return command if words else f"{command} with the config of the run"


def suggest_next(*steps: tuple[str | Path, ...]) -> None:
    """Show what can follow a command that has made a model; only a person at a terminal sees it.

    Args:
        steps: The words of a command after `headway`, and last its purpose.
    """
    if not steps or not sys.stderr.isatty():
        return
    notice(next_lines([(shlex.join(["headway", *map(str, words)]), str(purpose)) for *words, purpose in steps]))


def next_lines(steps: Sequence[tuple[str, str]]) -> str:
    """Return the lines that name commands which can follow, each with its purpose."""
    width = max(len(command) for command, _ in steps)
    return "\n".join(["next:", *(f"  {command.ljust(width)}  # {purpose}" for command, purpose in steps)])
