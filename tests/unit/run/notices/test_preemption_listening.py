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
from headway.core.process.signals import handled
from headway.run.notices import listening
from headway.run.session import joined as entry
from headway.run.session import session
from headway.run.session.attempt import ATTEMPT_VARIABLE, RunOptions, attempt_scope
from headway.run.session.preflight import RunPlan


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
    monkeypatch.setattr(entry, "listening", listen)
    joined = SimpleNamespace(directory=tmp_path)
    monkeypatch.setattr(entry.Attempt, "join", lambda *_: joined)
    world: Any = SimpleNamespace(is_first=first, local_rank=0 if first else 1)
    task: Any = None
    with entry.join_attempt(Config(), task, world, RunOptions(), attempt_scope) as attempt:
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


def test_no_command_that_tells_is_waited_for_before_a_notice_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several workers the agent would end this one meanwhile."""
    ends: list[str] = []

    @contextmanager
    def part(name: str, gives: Any) -> Iterator[Any]:
        try:
            yield gives
        finally:
            ends.append(name)

    opened: list[bool] = []
    alerts = SimpleNamespace(open_file=lambda: opened.append(True))
    world = SimpleNamespace(mesh=None, rank=0, is_first=True)
    monkeypatch.setattr(session, "join_workers", lambda *_: part("workers", world))
    monkeypatch.setattr(session, "check_model_is_cut", lambda *_: None)
    monkeypatch.setattr(session, "nothing_to_do", lambda *_: False)
    monkeypatch.setattr(session, "alerting", lambda *_: part("alerts", alerts))
    monkeypatch.setattr(session, "join_attempt", lambda *_: part("answer", SimpleNamespace(worker_log=str)))
    monkeypatch.setattr(session, "log_to", lambda *_, **__: part("log", None))

    def train(*_: object, **__: object) -> None:
        assert opened, "before there is anything to tell"
        raise Preempted("saved")

    monkeypatch.setattr(session, "_train", train)
    task: Any = SimpleNamespace(code={})
    with pytest.raises(Preempted):
        session.run_in_this_process(RunPlan.of(Config(), RunOptions()), lambda *_: task)
    assert ends == ["log", "answer", "alerts", "workers"]
