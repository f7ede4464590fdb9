"""The reference in a copy of a process that has just begun, for one question: what it makes of some texts.

`tokenizers` holds Python to itself while it loads a vocabulary, and with it all of a starting command. A copy loads it
on another core meanwhile. Whatever goes wrong there is found again where the reference is loaded in this process.
"""

from __future__ import annotations

import io
import json
import os
import signal
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from headway.core.files import sha256_bytes
from headway.data.tokenizing.library import encode, numbers_of, open_library


@dataclass(frozen=True)
class Answer:
    """What the reference makes of what it was asked."""

    ids: list[list[int]]
    """Of each text."""
    numbers: dict[str, int | None]
    """Of each token."""


class ReferenceProcess:
    """A copy of this process, which must have no other threads, that loads a `tokenizer.json` and answers once."""

    def __init__(self, file: Path) -> None:
        ours, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            ours.close()
            _serve(file, theirs)
        theirs.close()
        self._socket = ours

    def ask(self, content: bytes, texts: Sequence[str], tokens: Iterable[str]) -> Answer | None:
        """What it makes of texts, of which special tokens that they spell out are ordinary text, and the ids it has for
        tokens; None where it cannot tell, for example of another content than it has loaded. It ends with that."""
        try:
            with self._socket.makefile("rwb") as stream:
                _send(stream, [sha256_bytes(content), list(texts), list(tokens)])
                ids, numbers = _received(stream)
        except (OSError, ValueError):  # it has ended
            return None
        finally:
            self.end()
        return Answer(ids, numbers)

    def end(self) -> None:
        """End it."""
        self._socket.close()
        with suppress(ProcessLookupError, ChildProcessError):  # somebody has waited for all children
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _serve(file: Path, connection: socket.socket) -> NoReturn:
    """The life of the copy: it ends with the answer, with the other side, or with whatever goes wrong."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of a process group
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        content = file.read_bytes()
        library = open_library(content, special_tokens_in_text=False)
        with connection.makefile("rwb") as stream:
            digest, texts, tokens = _received(stream)
            if digest == sha256_bytes(content):
                _send(stream, [encode(library, texts), numbers_of(library, tokens)])
    finally:
        os._exit(0)


def _send(stream: io.BufferedRWPair, message: Any) -> None:
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


def _received(stream: io.BufferedRWPair) -> Any:
    """The next message.

    Raises:
        ValueError: the other side has ended.
    """
    return json.loads(stream.readline())
