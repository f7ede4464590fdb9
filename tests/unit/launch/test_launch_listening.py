"""Who listens for notices, and what may not come between a notice and its answer."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.config import Config, PreemptionConfig
from headway.core.errors import HeadwayError, Preempted
from headway.core.signals import handled
from headway.launch import listening, session
from headway.launch.attempt import ATTEMPT_VARIABLE, Wishes


@pytest.mark.parametrize("first", [True, False])
def test_the_first_worker_of_a_local_agent_listens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first: bool
) -> None:
    """And not the agent, whose threads would keep it from being copied."""
    heard: list[Path] = []

    @contextmanager
    def listen(attempt: Path, config: PreemptionConfig) -> Iterator[None]:
        heard.append(attempt)
        yield
        heard.clear()

    monkeypatch.setenv(ATTEMPT_VARIABLE, "1")
    monkeypatch.setattr(session, "listening", listen)
    joined = SimpleNamespace(directory=tmp_path)
    monkeypatch.setattr(session.Attempt, "join", lambda *_: joined)
    world: Any = SimpleNamespace(is_first=first)
    task: Any = None
    with session._joined_attempt(Config(), task, world, Wishes(), session.own_attempt) as attempt:
        assert attempt is joined and heard == [tmp_path] * first
    assert heard == []


@pytest.mark.parametrize(("error", "heard"), [(Preempted("saved"), 0), (HeadwayError("a mistake"), 1), (None, 1)])
def test_a_signal_of_the_agent_waits_for_the_answer_to_a_notice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception | None, heard: int
) -> None:
    came: list[int] = []

    @contextmanager
    def answer_slowly(*_: object) -> Iterator[None]:
        try:
            yield
        finally:
            signal.raise_signal(signal.SIGTERM)
            assert not came

    monkeypatch.setattr(listening, "watching_for", answer_slowly)
    with (
        handled((signal.SIGTERM,), lambda number, frame: came.append(number)),
        suppress(HeadwayError),
        listening.listening(tmp_path, PreemptionConfig()),
    ):
        if error is not None:
            raise error
    assert len(came) == heard, "who is preempted was asked for no more than that"
