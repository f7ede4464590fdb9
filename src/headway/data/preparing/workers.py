"""Running work in parallel and taking results in input order, on threads or on processes."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import connection, get_context, parent_process
from typing import TYPE_CHECKING

from headway.core.console import notice, redact_streams
from headway.core.errors import DataError
from headway.data.preparing.encode import PieceResult, PieceWorker, Recipe, Work

if TYPE_CHECKING:
    from headway.data.tokenizing.encoders import TextEncoder
    from headway.data.tokenizing.tokenizer import Tokenizer

# More threads than this wait for each other in Python; processes do not, but take half a second to start.
_MOST_THREADS = 4


class Pipeline:
    """Takes work and hands back results, in order, to whoever gave the work.

    Args:
        workers: Pieces that are processed at a time.
        pool: Where that happens.
    """

    def __init__(self, workers: int, pool: Executor) -> None:
        self._pool = pool
        # Few enough results wait for an earlier, slower piece that memory is bounded.
        self._room = 4 * workers
        self._waiting: deque[tuple[Future[PieceResult], Callable[[PieceResult], None]]] = deque()

    def submit(self, work: Work, accept: Callable[[PieceResult], None]) -> None:
        """Have a piece processed and `accept` called with the result, now or later, in the order of submission.

        Raises:
            DataError: an earlier piece has failed, or a worker process died.
        """
        with _dead_workers_named():
            self._waiting.append((self._pool.submit(_process, work), accept))
        while len(self._waiting) > self._room:
            self._next()

    def drain(self) -> None:
        """Wait for all that was submitted.

        Raises:
            DataError: a piece has failed, or a worker process died.
        """
        while self._waiting:
            self._next()

    def _next(self) -> None:
        future, accept = self._waiting.popleft()
        with _dead_workers_named():
            result = future.result()
        accept(result)


@contextmanager
def _dead_workers_named() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool:
        raise DataError(
            "a worker process died: killed, for example for want of memory, or it could not start",
            fix="use fewer workers; a script that calls `prepare` needs an `if __name__ == '__main__':` guard",
        ) from None


@contextmanager
def pipeline(recipe: Recipe, workers: int, tokenizer: Tokenizer | None = None) -> Iterator[Pipeline]:
    """A pipeline for the length of a block; on an error what has not begun is left undone.

    Args:
        recipe: What all pieces have in common.
        workers: Pieces that are processed at a time.
        tokenizer: The recipe's, if it is loaded already.

    Raises:
        ConfigError: cleaning or encoding needs an extra that is not installed.
        DataError: the tokenizer cannot be read.
    """
    pool: Executor | None = _processes(recipe, workers) if workers > 1 and _prefers_processes(recipe, workers) else None
    if pool is None:
        pool = ThreadPoolExecutor(workers, initializer=_start_thread, initargs=prepared(recipe, workers, tokenizer))
    try:
        yield Pipeline(workers, pool)
    finally:
        pool.shutdown(cancel_futures=True)


def _processes(recipe: Recipe, workers: int) -> Executor | None:
    """Return a pool of processes; None where the system lets processes share no locks."""
    try:
        return ProcessPoolExecutor(workers, get_context("spawn"), initializer=_start_process, initargs=(recipe,))
    except OSError as error:  # of /dev/shm: read-only, full, or missing
        notice(f"threads take the place of processes, which cannot share locks here (/dev/shm: {error.strerror})")
        return None


def _prefers_processes(recipe: Recipe, workers: int) -> bool:
    """Python code runs on one thread at a time; libraries that hash and encode let others run meanwhile."""
    in_python = bool(recipe.clean) or recipe.fingerprints is not None or recipe.encoder == "tokenizers"
    return in_python or workers > _MOST_THREADS


def prepared(
    recipe: Recipe, threads: int, tokenizer: Tokenizer | None = None
) -> tuple[Recipe, TextEncoder | None, int]:
    """The arguments of a worker, with the encoder, which its threads share."""
    if recipe.tokenizer is None:
        return recipe, None, 0
    from headway.data.tokenizing.encoders import open_encoder
    from headway.data.tokenizing.tokenizer import Tokenizer

    tokenizer = tokenizer or Tokenizer.load(recipe.tokenizer)
    encoder = open_encoder(recipe.encoder, tokenizer, recipe.special_tokens_in_text, threads=threads)
    return recipe, encoder, tokenizer.end_of_text_id


_local = threading.local()


def _start_thread(recipe: Recipe, encoder: TextEncoder | None, end_of_text: int) -> None:
    """First thing a worker thread does."""
    _local.worker = PieceWorker(recipe, encoder, end_of_text)


def _start_process(recipe: Recipe) -> None:
    """First thing a worker process does."""
    # Ctrl-C reaches the whole process group; the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    redact_streams()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _start_thread(*prepared(recipe, 1))


def _end_with_parent() -> None:
    """Workers of a parent that was killed would wait for work forever."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _process(work: Work) -> PieceResult:
    """`PieceWorker.process` on a worker thread or in a worker process."""
    result: PieceResult = _local.worker.process(work)
    return result
