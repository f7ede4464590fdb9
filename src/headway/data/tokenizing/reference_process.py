"""The reference in a forked process, which encodes some texts once.

`tokenizers` holds the interpreter lock while it loads a vocabulary, which would block a starting command. So a forked
process loads it on another core. It first makes the compact form of the vocabulary for the fast encoder, which also
holds the lock. Any error there occurs again when this process does the work itself.

Little is imported before the fork, since until then only one core is busy.
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
    """The reference's answer to a request."""

    ids: list[list[int]]
    """The ids of each text."""
    numbers: dict[str, int | None]
    """The id of each token."""


class Vocabulary(NamedTuple):
    """The vocabulary that a process has loaded."""

    file: Path
    digest: str
    """SHA-256 of its content."""
    short: bytes
    """`compact` of its content."""

    def is_of(self, content: bytes) -> bool:
        """Return whether the vocabulary was loaded from this content."""
        from headway.core.files.hashes import sha256_bytes

        return self.digest == sha256_bytes(content)


class ReferenceProcess:
    """A fork of this process that loads a `tokenizer.json` and answers once; this process must have a single thread.

    Args:
        find: Returns the file, if any; it is called in the fork.
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
        """Return the vocabulary that the process loads; None if it cannot load one."""
        with suppress(OSError, ValueError):  # the process has ended
            return self._loaded()
        return None

    def _loaded(self) -> Vocabulary:
        """Receive the process's first message; any thread may call this first."""
        with self._turn:
            if self._vocabulary is None:
                file, digest, size = _received(self._answers)
                short = self._answers.read(size)
                if len(short) < size:
                    raise ValueError("it ended in the middle")
                self._vocabulary = Vocabulary(Path(file), digest, short)
            return self._vocabulary

    def ask(self, content: bytes, texts: Sequence[str], tokens: Iterable[str]) -> Answer | None:
        """Encode texts, with spelled-out special tokens as ordinary text, and look up the ids of tokens.

        The process ends afterwards.

        Returns:
            The answer; None if there is none, for example since the process has loaded other content.
        """
        try:
            if self._loaded().is_of(content):
                _send(self._questions, [list(texts), list(tokens)])
                return Answer(*_received(self._answers))
        except (OSError, ValueError, TypeError):  # the process has ended, or a text is not valid Unicode
            pass
        finally:
            self.end()
        return None

    def end(self) -> None:
        """End the process."""
        with suppress(ProcessLookupError, ChildProcessError):  # other code has waited for all children
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        with self._turn:  # no thread is reading from it any more
            for pipe in (self._answers, self._questions):
                with suppress(OSError):  # buffered data that could not be sent
                    pipe.close()


def _serve(find: Callable[[], Path | None], hears: int, says: int) -> NoReturn:
    """Run the forked process, which ends after the answer, with the parent, or on any error."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group
        file = find()
        if file is not None:
            _answer(file, os.fdopen(hears, "rb"), os.fdopen(says, "wb"))
    finally:
        os._exit(0)


def _answer(file: Path, questions: BinaryIO, answers: BinaryIO) -> None:
    """Load a vocabulary, report it, and answer one request."""
    from headway.core.files.foreign import read_bytes
    from headway.core.files.hashes import sha256_bytes
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
    """Receive the next message.

    Raises:
        ValueError: The other side has ended.
    """
    return orjson.loads(pipe.readline())
