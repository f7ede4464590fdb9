"""Parallel processing of pieces on threads or processes, with results in input order."""

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

from headway.config.sections.clean import CleanStep
from headway.core.code_identity import is_source
from headway.core.console import notice, redact_streams
from headway.core.errors import DataError
from headway.core.functions import identify_function
from headway.data.tokenizing.encoders import open_encoder
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.text.preparing.encode import PieceWorker
from headway.text.preparing.pieces import PieceResult, Recipe, Work

if TYPE_CHECKING:
    from headway.data.tokenizing.encoders import TextEncoder

# More threads than this contend for the interpreter lock; processes do not, but take half a second to start.
_MAX_THREADS = 4


class Pipeline:
    """Processes pieces in parallel and delivers the results in the order of submission.

    Args:
        workers: Number of pieces to process at a time.
        pool: The executor that processes them.
    """

    def __init__(self, workers: int, pool: Executor) -> None:
        self._pool = pool
        # Bounds memory: at most so many results wait for an earlier, slower piece.
        self._max_waiting = 4 * workers
        self._waiting: deque[tuple[Future[PieceResult], Callable[[PieceResult], None]]] = deque()

    def submit(self, work: Work, accept: Callable[[PieceResult], None]) -> None:
        """Submit a piece; `accept` is called with its result, now or later, in the order of submission.

        Raises:
            DataError: An earlier piece failed, or a worker process died.
        """
        with _explain_dead_workers():
            self._waiting.append((self._pool.submit(_process, work), accept))
        while len(self._waiting) > self._max_waiting:
            self._next()

    def drain(self) -> None:
        """Wait for all submitted pieces.

        Raises:
            DataError: A piece failed, or a worker process died.
        """
        while self._waiting:
            self._next()

    def _next(self) -> None:
        future, accept = self._waiting.popleft()
        with _explain_dead_workers():
            result = future.result()
        accept(result)


@contextmanager
def _explain_dead_workers() -> Iterator[None]:
    """Turn the error of a broken process pool into a DataError."""
    try:
        yield
    except BrokenProcessPool:
        raise DataError(
            "a worker process died: it was killed, for example for lack of memory, or it could not start",
            fix="use fewer workers; a script that calls `prepare` needs an `if __name__ == '__main__':` guard",
        ) from None


@contextmanager
def pipeline(recipe: Recipe, workers: int, tokenizer: Tokenizer | None = None) -> Iterator[Pipeline]:
    """Run a pipeline for the duration of a block; on an error, pieces that have not started are cancelled.

    Args:
        recipe: The settings that all pieces share.
        workers: Number of pieces to process at a time.
        tokenizer: The recipe's tokenizer, if it is loaded already.

    Raises:
        ConfigError: Cleaning or encoding needs an extra that is not installed.
        DataError: The tokenizer cannot be read.
    """
    pool: Executor | None = _processes(recipe, workers) if workers > 1 and _prefers_processes(recipe, workers) else None
    if pool is None:
        pool = ThreadPoolExecutor(workers, initializer=_start_thread, initargs=prepared(recipe, workers, tokenizer))
    try:
        yield Pipeline(workers, pool)
    finally:
        pool.shutdown(cancel_futures=True)


def _processes(recipe: Recipe, workers: int) -> Executor | None:
    """Return a pool of processes, or None if the system does not let processes share locks."""
    try:
        return ProcessPoolExecutor(workers, get_context("spawn"), initializer=_start_process, initargs=(recipe,))
    except OSError as error:  # of /dev/shm: read-only, full, or missing
        notice(f"threads replace processes, which cannot share locks here (/dev/shm: {error.strerror})")
        return None


def _prefers_processes(recipe: Recipe, workers: int) -> bool:
    """Return whether to use processes: Python code runs on one thread at a time, but library calls run in parallel."""
    if any(_is_of_this_process(step) for steps in recipe.clean for step in steps):
        return False
    steps_in_python = any(recipe.clean) or recipe.chat is not None or recipe.fingerprints is not None
    return steps_in_python or recipe.encoder == "tokenizers" or workers > _MAX_THREADS


def _is_of_this_process(step: CleanStep) -> bool:
    """Return whether a step calls a function that no other process finds: one of a notebook, not of a script."""
    name = getattr(step, "function", "")
    return name.startswith("__main__:") and not is_source(identify_function(name, "data.clean"))


def prepared(
    recipe: Recipe, threads: int, tokenizer: Tokenizer | None = None
) -> tuple[Recipe, TextEncoder | None, int]:
    """Return the arguments of a `PieceWorker`, with an encoder that `threads` threads share."""
    if recipe.tokenizer is None:
        return recipe, None, 0

    tokenizer = tokenizer or Tokenizer.load(recipe.tokenizer)
    encoder = open_encoder(recipe.encoder, tokenizer, recipe.special_tokens_in_text, threads=threads)
    return recipe, encoder, tokenizer.end_of_text_id


_local = threading.local()


def _start_thread(recipe: Recipe, encoder: TextEncoder | None, end_of_text: int) -> None:
    """Initialize a worker thread."""
    _local.worker = PieceWorker(recipe, encoder, end_of_text)


def _start_process(recipe: Recipe) -> None:
    """Initialize a worker process."""
    # Ctrl-C reaches the whole process group; only the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    redact_streams()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _start_thread(*prepared(recipe, 1))


def _end_with_parent() -> None:
    """Exit when the parent dies: workers of a killed parent would wait for work forever."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _process(work: Work) -> PieceResult:
    """Process a piece with the `PieceWorker` of this thread or process."""
    result: PieceResult = _local.worker.process(work)
    return result
