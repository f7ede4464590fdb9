"""Sampling a figure of this machine on a thread, while others work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Sample = TypeVar("Sample")


class Sampler(Generic[Sample]):
    """Reads a figure again and again, from `start` to `stop`, or until it cannot be read.

    Args:
        read: Returns the figure.
        every_seconds: Time between two samples.
        name: Name of the thread.
    """

    def __init__(self, read: Callable[[], Sample], every_seconds: float, name: str) -> None:
        self.samples: list[Sample] = []
        self.every_seconds = every_seconds
        self._read = read
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        """Start sampling."""
        self._thread.start()

    def stop(self) -> list[Sample]:
        """Stop, and return the samples."""
        self._over.set()
        self._thread.join()
        return self.samples

    def _work(self) -> None:
        while not self._over.wait(self.every_seconds):
            try:
                self.samples.append(self._read())
            except Exception:  # the figure of a part of a GPU (MIG), for example
                return
