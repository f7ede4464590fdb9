"""A follower sends each value once, through kills at any line, restarts of the run, and trackers that do not answer."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.config.sections.track import OwnTrackerConfig, TrackConfig
from headway.core.errors import CheckpointError, HeadwayError
from headway.core.machine.system import host_name
from headway.telemetry.record import Run
from headway.tracking import cursor as cursor_module
from headway.tracking import delivery as delivery_module
from headway.tracking import follow as follow_module
from headway.tracking import follower as follower_module
from headway.tracking import history, wandb_sink
from headway.tracking.cursor import Cursor, CursorFile, InUse, cursor_name
from headway.tracking.describe import describe
from headway.tracking.follow import follow_all
from headway.tracking.follower import Follower, Waiting
from headway.tracking.history import StepSet
from headway.tracking.mlflow_sink import MlflowSink
from headway.tracking.sink import LostRun, Sink
from headway.tracking.wandb_sink import OfflineWandbSink
from support.followers import Crash, FakeMlflow, FakeMlflowError, Gate, MemorySink, append, record, steps, write_run

#: Two attempts: the second repeats steps 5 to 7, whose times differ, and an event comes at an earlier step than before.
RESTARTED = [
    *steps(1, 7),
    record(7, 1, checkpoint__saved_step=6.0),
    record(7, 1, evaluation__loss=0.5),
    *steps(5, 6, 2),
    record(6, 2, checkpoint__saved_step=4.0),
    *steps(7, 10, 2),
    record(10, 2, evaluation__loss=0.25, train__grad_norm="NaN"),
]
#: The same in short, for a kill at every line: 4 steps with two values each, and two events.
SHORT = [
    *steps(1, 3),
    record(3, 1, checkpoint__saved_step=2.0),
    *steps(2, 2, 2),
    record(2, 2, checkpoint__saved_step=1.0),
    *steps(3, 4, 2),
]
EXPECTED = {("train/loss", step): 1 / step for step in range(1, 11)} | {
    ("checkpoint/saved_step", 7): 6.0,
    ("checkpoint/saved_step", 6): 4.0,
    ("evaluation/loss", 7): 0.5,
    ("evaluation/loss", 10): 0.25,
}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of a few records, so that there are many."""
    monkeypatch.setattr(history, "BATCH_BYTES", 300)


def follow(run: Path, sink: Sink, name: str = "memory", **waiting: Any) -> list[str]:
    """Follow a run that is over, and return what was reported."""
    said: list[str] = []
    cursor = CursorFile(run, name)
    wait = Waiting(**{"is_over": lambda: True, "sleep": lambda seconds: None, "patience_seconds": 0.0, **waiting})
    try:
        Follower(run, sink, "memory", cursor, report=said.append, waiting=wait).run()
    finally:
        cursor.close()
    return said


def check(points: list[tuple[str, int, float]]) -> None:
    """Each value of the restarted run once, the first of those that a restart repeats with another one."""
    assert [found for found, count in Counter((name, step) for name, step, _ in points).items() if count > 1] == []
    values = {(name, step): value for name, step, value in points}
    assert {place: value for place, value in values.items() if place in EXPECTED} == EXPECTED
    assert [values["speed/step_seconds", step] for step in (5, 8)] == [0.1 + 5, 0.2 + 8]
    assert values["train/grad_norm", 10] != values["train/grad_norm", 10]


def test_each_value_is_sent_once(tmp_path: Path) -> None:
    sink = MemorySink()
    run = write_run(tmp_path, RESTARTED, outcomes=("worker 0 died", "finished"))
    assert follow(run, sink) == []
    check(sink.points[0])
    assert sink.statuses == ["finished"] and len(sink.uncertain) > 3 and not any(sink.uncertain)
    sent = len(sink.points[0])
    follow(run, sink)  # again: nothing is new
    assert len(sink.points[0]) == sent and sink.statuses == ["finished", "finished"]
    assert sink.opened[-1].generation == 0 and sink.opened[-1].id == "ab" * 16


class Killed:
    """A run whose follower is killed once, at any of the places where a kill makes a difference, then follows again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._gate = Gate()
        write = CursorFile.write

        def gated(file: CursorFile, cursor: Cursor) -> None:
            self._gate()
            write(file, cursor)
            self._gate()

        monkeypatch.setattr(CursorFile, "write", gated)
        # A kill needs no disk, and the description is the same each time.
        monkeypatch.setattr(cursor_module, "write_json", lambda path, value: path.write_text(json.dumps(value)))
        found = cache(lambda name: describe(Run(self._run)))
        monkeypatch.setattr(delivery_module, "describe", lambda run: found(run.name))

    def at(self, number: int, run: Path, make: Callable[[Gate], Sink]) -> bool:
        """Follow with a kill at the place of this number, and again to the end; return whether there is such a place.

        The second follower is killed too, a few places on.
        """
        self._run = run
        for ends_at in (number, 5, -1):
            self._gate = Gate(ends_at)
            try:
                follow(run, make(self._gate))
            except Crash:
                continue
            if ends_at == number:
                return False
        return True


def test_a_kill_at_any_line_loses_and_repeats_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = Killed(monkeypatch)
    for number in range(1000):
        sink = MemorySink()

        def made(gate: Gate, sink: MemorySink = sink) -> Sink:
            sink.gate = gate
            return sink

        run = write_run(tmp_path / str(number), SHORT, outcomes=("worker 0 died", "finished"))
        there = killed.at(number, run, made)
        points = [(name, step) for name, step, _ in sink.points[0]]
        assert len(set(points)) == len(points) == 10 and sink.statuses[-1] == "finished", number
        if not there:
            break
    assert number > 12


@pytest.mark.parametrize("chunk", [2, 1000])
def test_mlflow_has_each_value_once_after_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Its server keeps whatever it gets: it is the sink that must not send a value twice."""
    monkeypatch.setattr("headway.tracking.mlflow_sink._METRICS", chunk)
    killed = Killed(monkeypatch)
    for number in range(1000):
        server = FakeMlflow()
        server.install(monkeypatch)

        def made(gate: Gate, server: FakeMlflow = server) -> Sink:
            server.gate = gate
            return MlflowSink("http://127.0.0.1:1", "tiny")

        run = write_run(tmp_path / str(number), SHORT, outcomes=("worker 0 died", "finished"))
        there = killed.at(number, run, made)
        (found,) = server.runs.values()
        points = [(metric.key, metric.step) for metric in found.logged]
        assert len(set(points)) == len(points) == 10, number
        assert found.info.status == "FINISHED" and found.end == 2002_000
        if not there:
            break
    assert number > 25
    assert found.data.params["train.steps"] == "10" and found.data.tags["mlflow.source.git.commit"] == "0123abc"
    assert [one.dataset.name for one in found.inputs.dataset_inputs] == ["corpus"]
    assert "name: tiny" in found.files["config.yaml"]


def test_the_cursor_may_get_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then MLflow's run is found by its tag, and compared."""
    server = FakeMlflow()
    server.install(monkeypatch)
    run = write_run(tmp_path, RESTARTED[:8], outcomes=("worker 0 died", "finished"))
    follow(run, MlflowSink("http://127.0.0.1:1", "tiny"))
    (run / "tracking" / "memory.json").unlink()
    append(run, RESTARTED[8:])
    follow(run, MlflowSink("http://127.0.0.1:1", "tiny"))
    assert len(server.runs) == 1
    check([(metric.key, metric.step, metric.value) for metric in server.runs["run0"].logged])


def test_a_run_that_the_server_has_lost_is_sent_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeMlflow()
    server.install(monkeypatch)
    run = write_run(tmp_path, RESTARTED, outcomes=("worker 0 died", "finished"))
    follow(run, MlflowSink("http://127.0.0.1:1", "tiny"))
    server.runs.clear()
    assert any("sent again" in line for line in follow(run, MlflowSink("http://127.0.0.1:1", "tiny")))
    check([(metric.key, metric.step, metric.value) for metric in server.runs["run0"].logged])


def test_a_tracker_that_does_not_answer_gets_everything_later(tmp_path: Path) -> None:
    sink = MemorySink()
    sink.failures = 5
    run = write_run(tmp_path, RESTARTED, outcomes=("worker 0 died", "finished"))
    slept: list[float] = []
    said = follow(run, sink, patience_seconds=None, sleep=slept.append)
    check(sink.points[0])
    assert [line.partition(":")[0] for line in said] == ["memory does not answer", "memory answers again"]
    assert slept[:5] == [1.0, 2.0, 4.0, 8.0, 16.0]


def test_patience_ends_once_the_run_is_over(tmp_path: Path) -> None:
    sink = MemorySink()
    sink.failures = 10**6
    run = write_run(tmp_path, RESTARTED)
    with pytest.raises(HeadwayError) as raised:
        follow(run, sink)
    assert "does not answer: connection refused" in raised.value.what and "headway track" in str(raised.value.fix)


@pytest.mark.parametrize(("status", "found"), [(401, "refuses access"), (400, "refuses this run")])
def test_what_mlflow_refuses_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, found: str
) -> None:
    server = FakeMlflow()
    server.install(monkeypatch)
    server.error = FakeMlflowError(status, "INVALID_PARAMETER_VALUE")
    with pytest.raises(HeadwayError, match=found):
        follow(write_run(tmp_path, RESTARTED), MlflowSink("http://127.0.0.1:1", "tiny"), patience_seconds=None)
    assert len(server.requests) == 1


def test_a_run_that_continues_is_running_again(tmp_path: Path) -> None:
    sink = MemorySink()
    run = write_run(tmp_path, steps(1, 3), outcomes=("preempted",))
    follow(run, sink)
    assert sink.statuses == ["killed"]
    write_run(tmp_path / "more", [], outcomes=("preempted", None))
    (tmp_path / "more" / "tiny" / "attempts" / "002").rename(run / "attempts" / "002")
    looks = iter([False, False, True, True, True])
    append(run, steps(4, 5, 2))

    def slept(_: float) -> None:
        (run / "attempts/002/attempt.json").write_text(json.dumps({"number": 2, "outcome": "worker 0 crashed: no"}))

    follow(run, sink, is_over=lambda: next(looks), sleep=slept)
    assert sink.statuses == ["killed", "running", "failed"]
    assert sorted(step for name, step, _ in sink.points[0] if name == "train/loss") == [1, 2, 3, 4, 5]


def test_once_leaves_a_run_running_that_is_active(tmp_path: Path) -> None:
    run, sink = write_run(tmp_path, steps(1, 3), outcomes=("worker 0 died", None)), MemorySink()
    record = {"number": 2, "pid": os.getpid(), "host": host_name(), "started": time.time()}
    (run / "attempts/002/attempt.json").write_text(json.dumps(record))
    owner = {"attempt": 2, "token": "x", "host": host_name(), "pid": os.getpid(), "since": time.time()}
    (run / ".owner").write_text(json.dumps(owner))
    assert follower_module.is_live(run)
    follow(run, sink, goes_on=lambda: follower_module.is_live(run))
    assert sink.statuses == ["running"]
    (run / ".owner").write_text(json.dumps({**owner, "since": 0.0}))  # another process has its number now
    assert not follower_module.is_live(run)
    (run / "attempts/002/attempt.json").write_text(json.dumps({**record, "started": 0.0}))
    follow(run, sink, goes_on=lambda: follower_module.is_live(run))
    assert sink.statuses == ["running", "killed"]


def test_steps_that_are_trained_again_on_purpose_begin_a_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a change of the config; also with a kill at any line."""
    killed = Killed(monkeypatch)
    records = [*steps(1, 3), *steps(3, 4, 2, factor=3.0)]
    for number in range(1000):
        sink = MemorySink()

        def made(gate: Gate, sink: MemorySink = sink) -> Sink:
            sink.gate = gate
            return sink

        place = tmp_path / str(number)
        run = write_run(place, records, outcomes=("preempted", "finished"), configs=("one", "two"))
        there = killed.at(number, run, made)
        losses = {g: [(s, v) for name, s, v in found if name == "train/loss"] for g, found in sink.points.items()}
        assert losses == {0: [(1, 1.0), (2, 1 / 2), (3, 1 / 3)], 1: [(3, 1.0), (4, 3 / 4)]}, number
        assert {run.first_step for run in sink.opened if run.generation == 1} == {2}
        assert (sink.opened[-1].generation, sink.statuses[-1]) == (1, "finished")
        if not there:
            break
    assert number > 12


def test_a_restored_run_begins_a_generation_too_and_a_restart_does_not(tmp_path: Path) -> None:
    restored = MemorySink()
    records = [*steps(1, 6), *steps(3, 5, 3)]
    follow(write_run(tmp_path / "a", records, outcomes=("finished", "restored", "finished")), restored)
    assert {g: len(points) for g, points in restored.points.items()} == {0: 12, 1: 6}
    same = MemorySink()
    follow(
        write_run(tmp_path / "b", records, outcomes=("died", "died", "finished"), configs=("one", "one", "one")), same
    )
    assert {g: len(points) for g, points in same.points.items()} == {0: 12}


def test_a_line_is_sent_when_it_is_whole_and_lines_that_are_none_are_passed_over(tmp_path: Path) -> None:
    sink = MemorySink()
    run = write_run(tmp_path, steps(1, 2))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "attempt": 1, "train/loss"')
    follow(run, sink)
    assert {step for _, step, _ in sink.points[0]} == {1, 2}
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n[1]\n" + json.dumps(record(4, train__loss=0.5)) + "\n")
    append(run, [record(5, train__loss=1.0, note="x" * 1000)])  # longer than a batch
    follow(run, sink)
    assert {step for _, step, _ in sink.points[0]} == {1, 2, 4, 5}


@pytest.mark.parametrize("grown", [False, True], ids=["shorter", "grown past it"])
def test_a_file_that_was_cut_during_a_batch_is_compared_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grown: bool
) -> None:
    """A power failure takes lines that were sent already, and the run computes their steps again."""
    server = FakeMlflow()
    server.install(monkeypatch)
    run = write_run(tmp_path, steps(1, 6))
    follow(run, MlflowSink("http://127.0.0.1:1", "tiny"))
    path, lines = run / "tracking" / "memory.json", (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    start, end = sum(map(len, lines[:2])), sum(map(len, lines))
    path.write_text(json.dumps({**json.loads(path.read_text()), "place": start, "pending": end}))
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:4]))
    again = [record(5, 1, note="x" * 1000)] if grown else []
    append(run, again)
    if not grown:
        follow(run, MlflowSink("http://127.0.0.1:1", "tiny"))
    append(run, steps(5, 8))
    follow(run, MlflowSink("http://127.0.0.1:1", "tiny"))
    found = Counter((metric.key, metric.step) for metric in server.runs["run0"].logged)
    assert set(found.values()) == {1} and ("train/loss", 8) in found, found


def test_a_thread_that_breaks_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(follow_module, "follow", broken)
    waiting = Waiting(lambda: True)
    (error,) = follow_all([(tmp_path, waiting)], lambda _: [TrackConfig(own=OwnTrackerConfig(sink="a.b:C"))], print)
    assert "out of luck" in error.what


def test_a_worker_of_an_abandoned_attempt_is_not_heard(tmp_path: Path) -> None:
    sink = MemorySink()
    follow(write_run(tmp_path, [*steps(1, 2), *steps(3, 3, 2), *steps(9, 9, 1)], outcomes=("died", "finished")), sink)
    assert {step for _, step, _ in sink.points[0]} == {1, 2, 3}


def test_two_followers_of_one_tracker_refuse_each_other(tmp_path: Path) -> None:
    run = write_run(tmp_path, [])
    held = CursorFile(run, "memory")
    CursorFile(run, "other").close()
    with pytest.raises(InUse, match=f"another process follows this run .*: {os.getpid()}") as raised:
        CursorFile(run, "memory")
    assert isinstance(raised.value, CheckpointError) and raised.value.fix
    held.close()
    CursorFile(run, "memory").close()


def test_a_cursor_belongs_to_a_run_and_a_target(tmp_path: Path) -> None:
    assert cursor_name("mlflow", "http://a") != cursor_name("mlflow", "http://b")
    assert cursor_name("own.module:Class", "").startswith("own-module-Class-")
    file = CursorFile(write_run(tmp_path, []), "memory")
    file.write(Cursor("one", place=7, state={"run": "x"}))
    assert file.read("one") == Cursor("one", place=7, state={"run": "x"}) and file.read("two") == Cursor("two")
    file.path.write_text('{"run": "one", "place": -3}')
    assert file.read("one") == Cursor("one")
    file.path.write_text("no JSON")
    assert file.read("one") == Cursor("one")
    file.close()


def test_a_sink_that_raises_anything_is_tried_again(tmp_path: Path) -> None:
    class Odd(MemorySink):
        tries = 0

        def describe(self, description: Any) -> Any:
            self.tries += 1
            if self.tries == 1:
                raise LostRun("it is gone")
            if self.tries == 2:
                raise KeyError("what")
            return super().describe(description)

    sink = Odd()
    said = follow(write_run(tmp_path, steps(1, 3)), sink, patience_seconds=None)
    assert any("KeyError" in line for line in said) and any("sent again" in line for line in said)
    assert len(sink.points[0]) == 6


def test_a_tracker_that_always_loses_the_run_is_given_up(tmp_path: Path) -> None:
    class Forgetful(MemorySink):
        def describe(self, description: Any) -> Any:
            if len(self.opened) > 20:
                raise Crash
            raise LostRun("the run is gone at the server")

    with pytest.raises(HeadwayError, match="does not answer: the run is gone"):
        follow(write_run(tmp_path, steps(1, 3)), Forgetful())


def test_patience_begins_with_the_end_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracker that was away long before, and is back soon after, gets everything."""
    sink, now = MemorySink(), [0.0]
    sink.failures = 9
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def sleep(seconds: float) -> None:
        now[0] += seconds

    said = follow(
        write_run(tmp_path, steps(1, 3)), sink, is_over=lambda: now[0] > 60, sleep=sleep, patience_seconds=60.0
    )
    assert "answers again" in said[-1] and len(sink.points[0]) == 6 and now[0] > 60


def test_a_set_of_steps() -> None:
    found = StepSet()
    assert [found.add(step) for step in (3, 3, 8191, 8192, 2**62, 8192)] == [True, False, True, True, True, False]
    assert found.highest == 2**62


def test_what_describes_a_run_is_read_when_its_files_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery_module, "DESCRIBE_SECONDS", 0.0)
    run, sink, looks = write_run(tmp_path, steps(1, 2)), MemorySink(), iter([False] * 4 + [True])

    def slept(_: float) -> None:
        if len(sink.descriptions) == 1:
            (run / "samples.txt").write_text("Once password=hunter2hunter2\n")

    follow(run, sink, is_over=lambda: next(looks), sleep=slept)
    assert [sorted(one.files) for one in sink.descriptions] == [["config.yaml"], ["config.yaml", "samples.txt"]]
    assert "hunter2" not in sink.descriptions[-1].files["samples.txt"]


# W&B offline ----------------------------------------------------------------------------------------------------------


class FakeWandb:
    """W&B's client offline: a session is a folder, and its lines are on disk once it is finished.

    Args:
        gate: Ends the process at one of its places.
    """

    errors = SimpleNamespace(AuthenticationError=PermissionError, Error=ConnectionError)
    sessions = 0

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def Settings(self, **settings: Any) -> None:
        """Take none."""

    def init(self, **arguments: Any) -> SimpleNamespace:
        FakeWandb.sessions += 1
        name = f"offline-run-{FakeWandb.sessions:08d}-{arguments['id']}"
        files = Path(arguments["dir"]) / "wandb" / name / "files"
        files.mkdir(parents=True)
        path = files.parent / f"run-{arguments['id']}.wandb"
        path.write_bytes(b":W&B\xef\xbe\x00"[:7])
        self._gate()
        lines: list[dict[str, Any]] = []

        def log(values: dict[str, float], step: int) -> None:
            lines.append({"_step": step, **values})
            self._gate()

        def finish(exit_code: int) -> None:
            self._gate()
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            self._gate()

        return SimpleNamespace(
            config=SimpleNamespace(update=lambda *_, **__: None), dir=str(files), summary={},
            log=log, finish=finish, mark_preempting=lambda: None, save=lambda *_, **__: None,
        )  # fmt: skip


class OfflineSink(OfflineWandbSink):
    """The sink of a process that may be killed: nothing cleans up after it."""

    def close(self) -> None:
        if not isinstance(sys.exc_info()[1], Crash):
            super().close()


def wandb_lines(run: Path) -> list[dict[str, Any]]:
    """The lines of history in the order in which `wandb sync` sends them; it refuses a folder that is not whole."""
    paths = sorted((run / "tracking/wandb").glob("offline-run-*/*.wandb"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def check_wandb(run: Path, expected: dict[tuple[str, int], float]) -> None:
    lines = wandb_lines(run)
    steps_sent = [line.pop("_step") for line in lines]
    assert steps_sent == sorted(set(steps_sent)), "each step once, rising over all folders"
    values = {(name, step): value for step, line in zip(steps_sent, lines, strict=True) for name, value in line.items()}
    assert {place: value for place, value in values.items() if place in expected} == expected


def test_wandb_offline_has_each_step_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events count for the step that is the newest; one at an earlier step than that has no place in W&B."""
    monkeypatch.setattr(wandb_sink, "_client", lambda: FakeWandb(Gate()))
    monkeypatch.setattr(delivery_module, "FLUSH_SECONDS", 0.0)
    run = write_run(tmp_path, RESTARTED[:9], outcomes=("worker 0 died", "finished"))
    over = iter([False] * 8)
    follow(run, OfflineSink("p", None), is_over=lambda: next(over, True), goes_on=lambda: True)
    assert [line["_step"] for line in wandb_lines(run)] == list(range(1, 7)), "more may be recorded for the newest step"
    append(run, RESTARTED[9:])
    follow(run, OfflineSink("p", None))
    check_wandb(run, {place: value for place, value in EXPECTED.items() if place != ("checkpoint/saved_step", 6)})
    assert math.isnan(wandb_lines(run)[-1]["train/grad_norm"])
    folders = len(list((run / "tracking/wandb").iterdir()))
    assert folders > 2 and not list((run / "tracking").glob("wandb-unfinished-*/*"))
    follow(run, OfflineSink("other", None), name="other")
    assert len(wandb_lines(run)) == 20, "another project has steps of its own"


def test_a_kill_at_any_line_repeats_no_step_in_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = Killed(monkeypatch)
    monkeypatch.setattr(delivery_module, "FLUSH_SECONDS", 0.0)
    monkeypatch.setattr(wandb_sink, "sync_folder", lambda path: None)
    monkeypatch.setattr(wandb_sink.os, "fsync", lambda file: None)
    gates, rename = [Gate()], Path.rename

    def gated(path: Path, target: Path) -> Path:
        gates[-1]()
        moved = rename(path, target)
        gates[-1]()
        return moved

    def made(gate: Gate) -> Sink:
        gates.append(gate)
        return OfflineSink("p", None)

    monkeypatch.setattr(Path, "rename", gated)
    monkeypatch.setattr(wandb_sink, "_client", lambda: FakeWandb(gates[-1]))
    for number in range(1000):
        run = write_run(tmp_path / str(number), SHORT, outcomes=("worker 0 died", "finished"))
        there = killed.at(number, run, made)
        check_wandb(run, {("train/loss", step): 1 / step for step in range(1, 5)} | {("checkpoint/saved_step", 3): 2.0})
        if not there:
            break
    assert number > 30
