"""Watching of notice sources on background threads, which never slow down training."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from headway.config import PreemptionConfig
from headway.core.console import notice as say
from headway.core.console import warning
from headway.core.coordination.preemption_board import Notice, post
from headway.core.errors import Preempted
from headway.core.machine.system import Machine
from headway.run.notices.detect import make_sources
from headway.run.notices.metadata import Unavailable
from headway.run.notices.source import Source

#: Longest pause after failures: of a source that never answered, and of one that did, since its notice may be short.
_LONGEST_PAUSE_SECONDS = 60.0
_LONGEST_PAUSE_OF_KNOWN_SECONDS = 5.0


@contextmanager
def watching(
    config: PreemptionConfig,
    on_notice: Callable[[Notice], None],
    machine: Machine | None = None,
    sources: Sequence[Source] | None = None,
) -> Iterator[None]:
    """Watch for notices during a block, one thread per source, and report each notice once.

    If the block ends with `Preempted`, all is saved, and the notices are acknowledged to their sources.

    Args:
        config: The config's `preemption`: sources, and the grace period.
        on_notice: Called on a source's thread; if it fails, it is called again with the next answer.
        machine: Machine to detect sources on; this one if None.
        sources: Sources to use in place of the config's.
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
    """Watch for notices as `watching` does, and post them on the board of an attempt's folder for its workers."""

    def post_notice(found: Notice) -> None:
        try:
            post(attempt, found)
        except OSError as error:
            warning(f"a notice cannot be posted in {attempt} ({error}): stopping by a signal instead")
            if found.wish == "stop":
                os.kill(os.getpid(), signal.SIGTERM)

    with watching(config, post_notice):
        yield


class _Watcher:
    """A source and its thread."""

    def __init__(self, source: Source, grace_seconds: float, on_notice: Callable[[Notice], None]) -> None:
        self._source = source
        self._grace = grace_seconds
        self._on_notice = on_notice
        self._closing = threading.Event()
        self._handed: list[Notice] = []
        self._answered = False
        self._failures = 0
        # A daemon: an unanswered query must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=f"headway-notices-{source.name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread after the current query, without waiting for it."""
        self._closing.set()

    def acknowledge(self) -> None:
        """Acknowledge the reported notices to the source."""
        for found in {found.key: found for found in self._handed}.values():  # once, even if its deadline moved
            try:
                if found.wish == "stop":
                    self._source.acknowledge(found)
            except Exception as error:
                warning(f"a notice cannot be acknowledged to {self._source.name}: {error}")

    def _work(self) -> None:
        while not self._closing.is_set():
            try:
                self._ask()
                self._answered = True
                self._failures = 0
            except Exception as error:  # a failure here must not disturb training
                self._failures += 1
                if self._failures == 3:  # one or two may be transient
                    what = str(error) if isinstance(error, Unavailable) else f"{type(error).__name__}: {error}"
                    warning(f"{self._source.name} does not answer ({what}), so no notice can arrive; still trying")
            self._closing.wait(self._pause())

    def _ask(self) -> None:
        found = self._source.check()
        # Every answer repeats the notice. One with a new deadline counts as new.
        if found is None or found in self._handed or self._closing.is_set():
            return
        if found.wish == "stop" and found.deadline and found.deadline - time.time() > self._grace:
            return  # there is time, and the notice may yet be called off
        self._on_notice(found)
        self._handed.append(found)

    def _pause(self) -> float:
        longest = _LONGEST_PAUSE_OF_KNOWN_SECONDS if self._answered else _LONGEST_PAUSE_SECONDS
        pause = self._source.pause_seconds
        return pause if not self._failures else min(max(longest, pause), pause * 2.0 ** min(self._failures - 1, 10))
