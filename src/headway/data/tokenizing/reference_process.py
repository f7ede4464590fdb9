"""The reference in a copy of a process that has just begun, for one question: what it makes of some texts.

`tokenizers` holds Python to itself while it loads a vocabulary, and with it all of a starting command. A copy loads it
on another core meanwhile, and first makes the vocabulary short for the fast encoder, which holds Python too. Whatever
goes wrong there is found again where the same is done in this process.

Little is imported before the copy is made: until then there is work for one core alone.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import orjson

from headway.data.tokenizing.compact import compact


class Answer(NamedTuple):
    """What the reference makes of what it was asked."""

    ids: list[list[int]]
    """Of each text."""
    numbers: dict[str, int | None]
    """Of each token."""


class Vocabulary(NamedTuple):
    """What a process has loaded."""

    file: Path
    digest: str
    """SHA-256 of its content."""
    short: bytes
    """`compact` of its content."""

    def is_of(self, content: bytes) -> bool:
        """Whether that was its content."""
        from headway.core.files import sha256_bytes

        return self.digest == sha256_bytes(content)


class ReferenceProcess:
    """A copy of this process, which must have no other threads, that loads a `tokenizer.json` and answers once.

    Args:
        find: Says which, if any; it is called in the copy.
    """

    def __init__(self, find: Callable[[], Path | None]) -> None:
        (reads, writes), (hears, says) = os.pipe(), os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(reads)
            os.close(says)
            _serve(find, hears, writes)
        os.close(writes)
        os.close(hears)
        self._answers, self._questions = os.fdopen(reads, "rb"), os.fdopen(says, "wb")
        self._turn = threading.Lock()
        self._vocabulary: Vocabulary | None = None

    def vocabulary(self) -> Vocabulary | None:
        """What it loads; None when there is none that it can load."""
        with suppress(OSError, ValueError):  # it has ended
            return self._loaded()
        return None

    def _loaded(self) -> Vocabulary:
        """What it says first, whoever of two threads asks for it first."""
        with self._turn:
            if self._vocabulary is None:
                file, digest, size = _received(self._answers)
                short = self._answers.read(size)
                if len(short) < size:
                    raise ValueError("it ended in the middle")
                self._vocabulary = Vocabulary(Path(file), digest, short)
            return self._vocabulary

    def ask(self, content: bytes, texts: Sequence[str], tokens: Iterable[str]) -> Answer | None:
        """What it makes of texts, of which special tokens that they spell out are ordinary text, and the ids it has for
        tokens; None where it cannot tell, for example of another content than it has loaded. It ends with that."""
        try:
            if self._loaded().is_of(content):
                _send(self._questions, [list(texts), list(tokens)])
                return Answer(*_received(self._answers))
        except (OSError, ValueError, TypeError):  # it has ended, or a text is no Unicode
            pass
        finally:
            self.end()
        return None

    def end(self) -> None:
        """End it."""
        with suppress(ProcessLookupError, ChildProcessError):  # somebody has waited for all children
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        with self._turn:  # nobody waits for it any more
            for pipe in (self._answers, self._questions):
                with suppress(OSError):  # what could not be said
                    pipe.close()


def _serve(find: Callable[[], Path | None], hears: int, says: int) -> NoReturn:
    """The life of the copy: it ends with the answer, with the other side, or with whatever goes wrong."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of a process group
        file = find()
        if file is not None:
            _answer(file, os.fdopen(hears, "rb"), os.fdopen(says, "wb"))
    finally:
        os._exit(0)


def _answer(file: Path, questions: BinaryIO, answers: BinaryIO) -> None:
    """Load a vocabulary, say so, and answer the one question."""
    from headway.core.files import sha256_bytes
    from headway.core.foreign import read_bytes
    from headway.data.tokenizing.library import encode, numbers_of, open_library

    content = read_bytes(file)
    short = compact(content)
    _send(answers, [str(file), sha256_bytes(content), len(short)], short)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    library = open_library(content, special_tokens_in_text=False)
    texts, tokens = _received(questions)
    _send(answers, [encode(library, texts), numbers_of(library, tokens)])


def _send(pipe: BinaryIO, message: Any, more: bytes = b"") -> None:
    pipe.write(orjson.dumps(message) + b"\n" + more)
    pipe.flush()


def _received(pipe: BinaryIO) -> Any:
    """The next message.

    Raises:
        ValueError: the other side has ended.
    """
    return orjson.loads(pipe.readline())
