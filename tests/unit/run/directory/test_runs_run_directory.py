"""One run directory, one owner; and where an attempt starts."""

import errno
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.checkpoint.save import fence
from headway.checkpoint.store import CheckpointStore
from headway.core.console import warning
from headway.core.coordination.lease import OWNER_FILE
from headway.core.coordination.owner import read_owner
from headway.core.errors import CheckpointError
from headway.core.process import table as process_table
from headway.run.directory import ownership
from headway.run.directory.ledger import Ledger
from headway.run.directory.ownership import OwnerLock, wait_for_dead_machine, wait_for_orphaned_writers
from headway.run.directory.run_directory import Attempt, RunDirectory, command_line
from headway.run.session.start import check_nothing_lost
from headway.telemetry.metrics import MetricsLog, read_metrics
from headway.training.recording.recorders import Recorder
from support.runs import refuse_to_open
from support.states import names, save


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "runs" / "tiny")


@pytest.fixture
def attempt(run: RunDirectory) -> Iterator[Attempt]:
    attempt = run.begin_attempt("headway train tiny.yaml")
    yield attempt
    attempt.finish("finished", 0)


def record(attempt: Attempt) -> dict[str, Any]:
    return json.loads((attempt.directory / "attempt.json").read_text())  # type: ignore[no-any-return]


def die(attempt: Attempt) -> None:
    """Let go of the lock without another word, as a kill does."""
    assert attempt._lock is not None
    attempt._lock.release()


def test_making_the_object_touches_nothing(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "x" / "y")
    assert names(tmp_path) == []


def test_an_attempt_records_itself(attempt: Attempt) -> None:
    facts = record(attempt)
    assert attempt.number == 1 and attempt.directory.name == "001"
    assert facts["number"] == 1 and facts["command"] == "headway train tiny.yaml" and facts["pid"] == os.getpid()
    assert facts["started"] > 1.7e9 and facts["host"]
    assert "outcome" not in facts and "ended" not in facts


def test_an_attempt_records_why_it_ended(run: RunDirectory) -> None:
    attempt = run.begin_attempt("x")
    attempt.finish("preempted", 75, first_step=0, last_step=40)
    facts = record(attempt)
    assert (facts["outcome"], facts["exit_code"], facts["first_step"], facts["last_step"]) == ("preempted", 75, 0, 40)
    assert facts["ended"] >= facts["started"]


def test_an_attempt_records_how_long_it_went_whatever_the_clock_did(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that nobody sets, from when its first process began."""
    now, steady = [2e9], [50.0]
    monkeypatch.setattr("headway.run.directory.run_directory.time.time", lambda: now[0])
    monkeypatch.setattr("headway.run.directory.run_directory.time.monotonic", lambda: steady[0])
    attempt = run.begin_attempt("x", started=2e9 - 3)
    now[0], steady[0] = 1e9, 57.0
    attempt.finish("finished", 0)
    assert record(attempt)["seconds"] == 10.0 and record(attempt)["ended"] == 1e9


def test_a_second_owner_is_refused_and_told_who_has_it(run: RunDirectory, attempt: Attempt) -> None:
    with pytest.raises(CheckpointError) as error:
        run.begin_attempt("y")
    assert "in use by attempt 1" in error.value.what and str(os.getpid()) in error.value.what
    assert error.value.exit_code == 4 and "name=" in str(error.value.fix)
    with pytest.raises(CheckpointError, match="in use"):
        run.archive()
    attempt.assert_current()
    assert names(run.attempts) == ["001"]


def test_the_lock_of_another_machine_is_waited_for_and_its_end_seen(
    run: RunDirectory, attempt: Attempt, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server of NFS gives up what a dead machine has locked after a while."""
    with monkeypatch.context() as patch:
        patch.setattr(ownership, "wait_until", lambda *_: pytest.fail("it waits for an owner that is here, and alive"))
        wait_for_dead_machine(run.path)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(ownership, "host_name", lambda: "another")
    wait_for_dead_machine(run.path, lambda: True)
    assert f"the run is held by {attempt.owner}" in capsys.readouterr().err
    threading.Timer(0.3, lambda: die(attempt)).start()
    wait_for_dead_machine(run.path)
    run.claim().release()


#: Writes a checkpoint when its attempt is dead: a while, or not at all, or as long as it is let.
WRITER = """
import fcntl, os, signal, sys, time
from pathlib import Path
run, way = Path(sys.argv[1]), sys.argv[2]
(run / ".writers").mkdir(exist_ok=True)
lock = (run / ".writers/00000").open("w")
fcntl.flock(lock, fcntl.LOCK_SH)
print("writes", flush=True)
if way == "idle":
    time.sleep(600)
if way == "stopped":
    os.kill(os.getpid(), signal.SIGSTOP)
while way == "on" or time.process_time() < 1.5:
    pass
(run / "written").touch()
"""


@pytest.fixture
def orphan(run: RunDirectory) -> Iterator[Callable[[str], None]]:
    """Starts a process that writes beside nobody."""
    started: list[subprocess.Popen[str]] = []

    def start(way: str) -> None:
        command = [sys.executable, "-c", WRITER, str(run.path), way, process_table.FINISHES_ITS_WORK]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout is not None and started[-1].stdout.readline() == "writes\n"

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_a_checkpoint_that_outlives_its_command_is_waited_for(
    run: RunDirectory, orphan: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever was done since the checkpoint before would be done again."""
    attempt = run.begin_attempt("x")
    orphan("for a while")
    wait_for_orphaned_writers(run.path)
    assert not (run.path / "written").exists() and capsys.readouterr().err == "", "it is a living attempt's"
    die(attempt)
    wait_for_orphaned_writers(run.path)
    assert (run.path / "written").exists() and "waiting for the checkpoint that process " in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_a_writer_that_does_not_get_on_is_not_waited_for_for_ever(
    run: RunDirectory, orphan: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    die(run.begin_attempt("x"))
    monkeypatch.setattr(process_table, "IDLE_SECONDS", 0.5)
    monkeypatch.setattr(process_table, "_LOOKS", 3)
    orphan("idle")
    wait_for_orphaned_writers(run.path)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_a_stopped_writer_of_a_dead_command_is_continued(run: RunDirectory, orphan: Callable[[str], None]) -> None:
    die(run.begin_attempt("x"))
    orphan("stopped")
    wait_for_orphaned_writers(run.path)
    assert (run.path / "written").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_nobody_waits_for_a_writer_when_told_to_stop(run: RunDirectory, orphan: Callable[[str], None]) -> None:
    die(run.begin_attempt("x"))
    orphan("on")
    looks: list[bool] = []
    wait_for_orphaned_writers(run.path, lambda: looks.append(True) or len(looks) > 2)
    assert len(looks) == 3


def test_attempts_count_up_and_the_dead_are_marked(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    first = run.begin_attempt("x")
    page = first.directory / "heartbeat-0"
    page.symlink_to("/proc/0/fd/9")
    die(first)
    second = run.begin_attempt("y")
    assert second.number == 2 and not page.is_symlink()
    assert record(first)["outcome"] == "died" and "ended" not in record(first)
    assert "attempt 1 died" in capsys.readouterr().err
    second.finish("finished", 0)
    third = run.begin_attempt("z")
    assert [facts.get("outcome") for facts in run.attempt_records()] == ["died", "finished", None]
    third.finish("finished", 0)
    assert "died" not in capsys.readouterr().err


def test_what_a_killed_attempt_has_half_written_goes_with_the_next(run: RunDirectory) -> None:
    first = run.begin_attempt("x")
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    gone = [folder / f".run.json.{ended.pid}.tmp" for folder in (run.path, first.directory)]
    kept = [run.path / f".report.html.{os.getppid()}.tmp", run.path / ".notes.tmp"]  # of who is at work; of a person
    for path in gone + kept:
        path.write_text("{")
    die(first)
    run.begin_attempt("y").finish("finished", 0)
    assert not any(path.exists() for path in gone) and all(path.exists() for path in kept)


@pytest.mark.parametrize("lost", [OWNER_FILE, "attempts"])
def test_a_number_is_never_given_twice(run: RunDirectory, lost: str) -> None:
    run.begin_attempt("x").finish("finished", 0)
    run.begin_attempt("x").finish("finished", 0)
    path = run.path / lost
    path.unlink() if path.is_file() else path.rename(run.path / "moved")
    attempt = run.begin_attempt("y")
    assert attempt.number == 3
    attempt.finish("finished", 0)


def test_an_attempt_that_was_overtaken_is_fenced(run: RunDirectory) -> None:
    old = run.begin_attempt("x")
    old.assert_current()
    die(old)
    new = run.begin_attempt("y")
    with pytest.raises(CheckpointError, match="attempt 1 no longer owns this run; its owner is now attempt 2"):
        old.assert_current()
    new.assert_current()
    new.finish("finished", 0)


def test_workers_join_by_number_and_are_fenced_too(run: RunDirectory) -> None:
    owner = run.begin_attempt("x")
    worker = Attempt.join(run.path, 1)
    worker.assert_current()
    assert worker.number == 1 and worker.directory == owner.directory
    with pytest.raises(CheckpointError, match="attempt 2 no longer owns"):
        Attempt.join(run.path, 2)
    die(owner)
    new = run.begin_attempt("y")
    with pytest.raises(CheckpointError, match="no longer owns"):
        worker.assert_current()
    with pytest.raises(CheckpointError, match="no longer owns"):
        Attempt.join(run.path, 1)
    new.finish("finished", 0)


def test_attempt_1_is_not_taken_for_attempt_1_of_the_run_before(run: RunDirectory) -> None:
    zombie = run.begin_attempt("x")
    die(zombie)
    moved = run.archive()
    with pytest.raises(CheckpointError, match="owner is now unknown"):
        zombie.assert_current()
    new = run.begin_attempt("y")
    assert new.number == 1 and moved is not None
    with pytest.raises(CheckpointError, match="no longer owns"):
        zombie.assert_current()
    new.finish("finished", 0)


def test_a_fenced_attempt_cannot_publish_a_checkpoint(run: RunDirectory) -> None:
    old = run.begin_attempt("x")
    store = CheckpointStore(run.checkpoints, may_write=old.assert_current)
    save(store, 1)
    die(old)
    new = run.begin_attempt("y")
    with pytest.raises(CheckpointError, match="no longer owns"):
        save(store, 2)
    assert names(run.checkpoints) == ["step-00000001"]
    new.finish("finished", 0)


def test_a_forked_child_does_not_keep_the_lock(run: RunDirectory) -> None:
    attempt = run.begin_attempt("x")
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"!")
        os.read(done[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        die(attempt)
        run.begin_attempt("y").finish("finished", 0)
    finally:
        os.write(done[1], b"!")
        os.waitpid(child, 0)


def test_a_folder_of_something_else_is_refused_untouched(run: RunDirectory) -> None:
    run.path.mkdir(parents=True)
    run.config_path.write_text("mine: true\n")
    for action in (lambda: run.begin_attempt("x"), run.archive):
        with pytest.raises(CheckpointError, match="is not a run directory; nothing in it was touched"):
            action()
    assert names(run.path) == ["config.yaml"]


def test_an_empty_folder_is_welcome(run: RunDirectory) -> None:
    run.path.mkdir(parents=True)
    run.begin_attempt("x").finish("finished", 0)


def test_a_file_in_place_of_the_folder(run: RunDirectory) -> None:
    run.path.parent.mkdir()
    run.path.write_text("text")
    with pytest.raises(CheckpointError, match="Not a directory"):
        run.begin_attempt("x")
    assert run.path.read_text() == "text"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which nobody can write")
def test_a_parent_that_cannot_be_written() -> None:
    with pytest.raises(CheckpointError, match="run directory cannot be used") as error:
        RunDirectory(Path("/proc/headway-runs/tiny")).begin_attempt("x")
    assert "/proc/headway-runs" in str(error.value.where)


def test_a_file_system_that_is_read_only_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY | os.ST_NOSUID))
    with pytest.raises(CheckpointError, match="cannot be used: Read-only file system") as refused:
        RunDirectory(tmp_path / "run").check_usable()
    assert "mount it for writing" in str(refused.value.fix)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=0))
    with pytest.raises(CheckpointError, match="cannot be used: Permission denied"):
        RunDirectory(tmp_path / "run").check_usable()


def test_a_file_system_without_locks(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    with pytest.raises(CheckpointError, match="cannot be locked: Operation not supported"):
        run.begin_attempt("x")


def test_a_full_disk_at_the_start_leaves_the_run_free(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("headway.run.directory.run_directory.write_json", full)
        with pytest.raises(CheckpointError, match="No space left"):
            run.begin_attempt("x")
    run.begin_attempt("y").finish("finished", 0)


def test_a_full_disk_at_the_end_does_not_hide_why_it_ended(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    attempt = run.begin_attempt("x")
    with monkeypatch.context() as patch:
        patch.setattr("headway.run.directory.run_directory.write_json", full)
        attempt.finish("the checkpoint cannot be written", 4)
    assert "No space left" in capsys.readouterr().err
    run.begin_attempt("y").finish("finished", 0)


def test_a_lock_on_a_moved_folder_is_not_taken_for_one_on_the_new(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening `.owner` and locking it, another process moves the run aside and starts a new one."""
    import fcntl

    run.begin_attempt("x").finish("finished", 0)
    calls = []

    def flock(file: Any, operation: int) -> None:
        if not calls:
            run.path.rename(run.path.with_name("tiny.old-001"))
            run.path.mkdir()
        calls.append(file)
        real(file, operation)

    real = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", flock)
    lock = OwnerLock.take(run.path)
    assert len(calls) == 2
    lock.release()


def test_archive_moves_the_run_aside(run: RunDirectory) -> None:
    assert run.archive() is None
    for expected in ("tiny.old-001", "tiny.old-002"):
        run.begin_attempt("x").finish("finished", 0)
        (run.path / "note").write_text(expected)
        moved = run.archive()
        assert moved == run.path.with_name(expected) and (moved / "note").read_text() == expected
        assert not run.path.exists()


def test_a_broken_owner_file_is_no_owner(run: RunDirectory) -> None:
    run.begin_attempt("x").finish("finished", 0)
    for content in (b"", b"{", b"[]", b'{"attempt": 1}'):
        (run.path / OWNER_FILE).write_bytes(content)
        assert read_owner(run.path) is None
    attempt = run.begin_attempt("y")
    assert attempt.number == 2
    attempt.assert_current()
    attempt.finish("finished", 0)


# Where an attempt starts


@pytest.fixture
def store(run: RunDirectory) -> CheckpointStore:
    return CheckpointStore(run.checkpoints)


def start_of(run: RunDirectory, store: CheckpointStore) -> int:
    """The step from which an attempt starts that looks at the run directory alone."""
    found = store.newest(warning)
    check_nothing_lost(run, found)
    return 0 if found is None else found.step


def test_a_new_run_starts_at_step_0_quietly(
    run: RunDirectory, attempt: Attempt, store: CheckpointStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start_of(run, store) == 0
    assert capsys.readouterr().err == ""


def test_a_run_killed_before_its_first_checkpoint_starts_again_and_says_so(
    run: RunDirectory, store: CheckpointStore, capsys: pytest.CaptureFixture[str]
) -> None:
    die(run.begin_attempt("x"))
    again = run.begin_attempt("y")
    assert start_of(run, store) == 0
    assert "has no checkpoint yet: starting again from step 0" in capsys.readouterr().err
    again.finish("finished", 0)


def test_a_run_resumes_from_the_newest_good_checkpoint(
    run: RunDirectory, attempt: Attempt, store: CheckpointStore, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (10, 20):
        save(store, step)
        Ledger(run.ledger_path).commit(1, step - 10, step, {}, f"step-{step:08d}")
    assert start_of(run, store) == 20
    assert capsys.readouterr().err == ""
    (run.checkpoints / "step-00000020" / "manifest.json").unlink()
    assert start_of(run, store) == 10
    said = capsys.readouterr().err
    assert "passing over" in said and "going back from step 20 to step 10" in said


def test_a_checkpoint_that_the_ledger_does_not_know_yet_counts(
    run: RunDirectory, attempt: Attempt, store: CheckpointStore
) -> None:
    save(store, 10)
    assert start_of(run, store) == 10


def test_a_run_whose_checkpoints_are_gone_never_starts_over(
    run: RunDirectory, attempt: Attempt, store: CheckpointStore
) -> None:
    Ledger(run.ledger_path).commit(1, 0, 10, {}, "step-00000010")
    with pytest.raises(CheckpointError, match="step 10 of this run was saved, but its checkpoints are gone") as error:
        start_of(run, store)
    assert "--restart" in str(error.value.fix) and error.value.exit_code == 4


def test_a_run_whose_checkpoints_are_damaged_never_starts_over(
    run: RunDirectory, attempt: Attempt, store: CheckpointStore
) -> None:
    save(store, 10)
    (run.checkpoints / "step-00000010" / "shard-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints verifies"):
        start_of(run, store)


def test_a_command_is_written_down_as_it_can_be_typed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["headway", "train", "my run.yaml", "checkpoint.every=3 steps"])
    assert shlex.split(command_line()) == sys.argv


def fail_reads(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Let the owner's record be unreadable so often, as on a network file system that is away."""
    left = [times]

    def failing(path: Path) -> OSError | None:
        if path.name != OWNER_FILE or not left[0]:
            return None
        left[0] -= 1
        return OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    refuse_to_open(monkeypatch, failing)


def test_a_passing_read_error_takes_nobodys_run_away(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = run.begin_attempt("x")
    fail_reads(monkeypatch, 2)
    attempt.assert_current()
    attempt.finish("finished", 0)


def test_an_owner_that_cannot_be_read_is_no_other_owner(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = run.begin_attempt("x")
    fail_reads(monkeypatch, 100)
    with monkeypatch.context() as patch, pytest.raises(fence.OwnerUnknown):
        no_waiting = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: pytest.fail("it waits"))
        patch.setattr(fence, "time", no_waiting)
        attempt.fence.assert_held(patience_seconds=0.0)  # as who asks at every step
    monkeypatch.setattr(fence, "_PATIENCE_SECONDS", 0.0)
    with pytest.raises(fence.OwnerUnknown, match="the owner of this run cannot be read"):
        attempt.assert_current()
    recorder = Recorder(tmp_path / "metrics.jsonl", 1, may_write=attempt.assert_current)
    recorder._log = MetricsLog(tmp_path / "metrics.jsonl", 1, recorder._assert_not_lost)
    recorder._log.write(3, {"train/loss": 1.0})  # training goes on, and its record with it
    assert read_metrics(tmp_path).last("train/loss") == 1.0
    attempt.finish("finished", 0)
