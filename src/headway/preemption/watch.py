"""Listening for notices on threads that training never feels."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from headway.core.console import notice as say
from headway.core.console import warning
from headway.core.errors import Preempted
from headway.core.machine import Machine
from headway.core.preemption_board import Notice, post
from headway.preemption.detect import make_sources
from headway.preemption.metadata import Unavailable
from headway.preemption.source import Source

if TYPE_CHECKING:
    from headway.config import PreemptionConfig

#: Who has never answered is asked ever more seldom. Who has is asked again soon, since a notice may be short.
_LONGEST_PAUSE_SECONDS, _LONGEST_PAUSE_OF_KNOWN_SECONDS = 60.0, 5.0


@contextmanager
def watching(
    config: PreemptionConfig,
    on_notice: Callable[[Notice], None],
    machine: Machine | None = None,
    sources: Sequence[Source] | None = None,
) -> Iterator[None]:
    """Listen for notices during a block, one thread per source, and hand them on once each.

    When the block ends with `Preempted`, all is saved, and whoever has announced an end is told so.

    Args:
        config: Whom to listen to, and how long before an end it matters.
        on_notice: Called on a source's thread; when it fails it is called again with the next answer.
        machine: Where clouds are looked for; this one when not given.
        sources: Take these in place of those that the config asks for.
    """
    chosen = make_sources(config, machine or Machine()) if sources is None else sources
    watchers = [_Watcher(source, config.grace_seconds, on_notice) for source in chosen]
    if watchers:
        say(f"watching for notices of {', '.join(source.name for source in chosen)}")
    for watcher in watchers:
        watcher.start()
    try:
        yield
    except Preempted:
        for watcher in watchers:
            watcher.acknowledge()
        raise
    finally:
        for watcher in watchers:
            watcher.close()


@contextmanager
def watching_for(attempt: Path, config: PreemptionConfig) -> Iterator[None]:
    """`watching`, with notices put on the board of an attempt's folder, where its workers read them."""

    def put_up(found: Notice) -> None:
        try:
            post(attempt, found)
        except OSError as error:
            warning(f"a notice cannot be put on the board of {attempt} ({error}): stopping by a signal instead")
            if found.wish == "stop":
                os.kill(os.getpid(), signal.SIGTERM)

    with watching(config, put_up):
        yield


class _Watcher:
    """One source and its thread."""

    def __init__(self, source: Source, grace_seconds: float, on_notice: Callable[[Notice], None]) -> None:
        self._source, self._grace, self._on_notice = source, grace_seconds, on_notice
        self._closing = threading.Event()
        self._handed: list[Notice] = []
        self._answered, self._failures = False, 0
        # A daemon: a question that is waiting for its answer must not keep the process.
        self._thread = threading.Thread(target=self._work, name=f"headway-notices-{source.name}", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def close(self) -> None:
        """End after the question that is under way; that is not waited for."""
        self._closing.set()

    def acknowledge(self) -> None:
        """Answer what this source has announced."""
        for found in {found.key: found for found in self._handed}.values():  # one that was moved is answered once
            try:
                if found.wish == "stop":
                    self._source.acknowledge(found)
            except Exception as error:
                warning(f"{self._source.name} cannot be told that all is saved: {error}")

    def _work(self) -> None:
        while not self._closing.is_set():
            try:
                self._ask()
                self._answered, self._failures = True, 0
            except Exception as error:  # whatever is wrong here is no reason to disturb training
                self._failed(error)
            self._closing.wait(self._pause())

    def _ask(self) -> None:
        found = self._source.check()
        # The same notice is announced in every answer. An end that has moved is another one.
        if found is None or found in self._handed or self._closing.is_set():
            return
        if found.wish == "stop" and found.deadline and found.deadline - time.time() > self._grace:
            return  # it has time: what was announced may yet be called off
        self._on_notice(found)
        self._handed.append(found)

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == 3:  # one or two may be an accident
            what = str(error) if isinstance(error, Unavailable) else f"{type(error).__name__}: {error}"
            warning(f"no notice can come from {self._source.name}, which does not answer ({what}); asking on")

    def _pause(self) -> float:
        longest = _LONGEST_PAUSE_OF_KNOWN_SECONDS if self._answered else _LONGEST_PAUSE_SECONDS
        pause = self._source.pause_seconds
        return pause if not self._failures else min(max(longest, pause), pause * 2.0 ** min(self._failures - 1, 10))
