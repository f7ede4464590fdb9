"""The process beside a worker where its start, its output, its disk or its neighbours are not as they should be."""

import errno
import io
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.checkpoint.format.file_layout import Elements, Piece, plan_files
from headway.checkpoint.save import (
    memory_snapshot,
    outstanding_saves,
    publish,
    writer_client,
    writer_locks,
    writer_process,
)
from headway.checkpoint.save.fence import Fence
from headway.checkpoint.save.memory_snapshot import MemorySnapshots
from headway.checkpoint.save.messages import HoldSnapshot, SaveJob, Write, WriterSettings
from headway.checkpoint.save.outcomes import Outcome, WriterDied
from headway.checkpoint.save.parts import failure_name, write_part
from headway.checkpoint.save.publish import Publisher
from headway.checkpoint.save.writer import CheckpointWriter
from headway.checkpoint.save.writer_locks import open_writer_lock
from headway.checkpoint.store import CheckpointStore
from headway.core import console
from headway.core.coordination.owner import Owner
from headway.core.errors import CheckpointError
from headway.core.process.command import module_command
from headway.core.process.waiting import wait_until
from headway.core.types import Block
from support.states import make_state, submit
from support.waits import LONG


def pid(writer: CheckpointWriter) -> int:
    return writer._saves.process.pid


def within(seconds: float, act: Callable[[], None]) -> None:
    """Do something that may never come back, which is to fail and not to hang."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it still waits"


# What it is started with


def test_a_file_in_the_working_folder_is_not_taken_for_a_module(tmp_path: Path) -> None:
    """As the console script starts: the working folder is no place where it looks for modules."""
    for name in ("queue", "json", "runpy"):
        (tmp_path / f"{name}.py").write_text('raise SystemExit("this is my script")')
    script = (
        "import torch; from pathlib import Path; from headway.checkpoint.save.messages import WriterSettings;"
        "from headway.checkpoint.save.writer import CheckpointWriter; from headway.core.types import Block;"
        "w = CheckpointWriter(WriterSettings(Path('checkpoints')));"
        "w.submit(1, {'a': Block.whole(torch.ones(3))}, {'step': 1}, {}); w.wait(); w.close()"
    )
    subprocess.run([sys.executable, "-P", "-c", script], cwd=tmp_path, check=True, timeout=LONG)
    assert CheckpointStore(tmp_path / "checkpoints").verify(1).good


@pytest.mark.parametrize("wanted", ["", "the folder's name", "none"])
def test_a_module_finds_modules_where_its_starter_does(
    wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("import sys; print(__name__, sys.argv[1:], sys.path)")
    monkeypatch.chdir(tmp_path)
    place = str(tmp_path) if wanted else ""
    monkeypatch.setattr(sys, "path", sys.path if wanted == "none" else [place, *sys.path])
    result = subprocess.run(module_command("mine", "a", "b"), capture_output=True, text=True, check=False)
    if wanted == "none":
        assert "No module named mine" in result.stderr
    else:
        assert result.stdout == f"__main__ ['a', 'b'] {sys.path}\n"


# What it says


def test_what_else_is_printed_on_its_output_goes_to_the_log(
    settings: WriterSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines that are no JSON, JSON but no answer, and no text at all."""
    lines = [b"welcome", b"7", b"{}", b"\xff\xfe"]
    (tmp_path / "sitecustomize.py").write_text(f"import os\nfor line in {lines!r}:\n    os.write(1, line + b'\\n')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with console.log_to(tmp_path / "log"):
        writer = CheckpointWriter(settings)
        submit(writer, 1)
        within(60, writer.wait)
        writer.close()
    assert [outcome.error for outcome in writer.outcomes()] == [None]
    assert (tmp_path / "log").read_text().splitlines()[:4] == ["welcome", "7", "{}", "\\xff\\xfe"]


def test_an_answer_that_cannot_be_taken_ends_the_process_and_not_the_hope(
    writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outstanding_saves, "Outcome", lambda *_, **failed: Outcome(1, **failed) if failed else 1 // 0)
    submit(writer, 1)
    within(60, lambda: writer.wants_another_try() or None)
    [outcome] = writer.outcomes()
    assert isinstance(outcome.error, WriterDied) and "ZeroDivisionError" in outcome.error.what
    monkeypatch.undo()
    submit(writer, 2)
    within(60, writer.wait)


# When no other can be started


def no_more_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(writer_client.subprocess, "Popen", fail)


def test_saves_for_which_no_process_can_be_started_are_told(
    writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a process that died, and further ones; training goes on, and the next save is tried."""
    os.kill(pid(writer), signal.SIGSTOP)
    submit(writer, 1)
    submit(writer, 2)
    with monkeypatch.context() as patch:
        no_more_processes(patch)
        os.kill(pid(writer), signal.SIGKILL)
        found = list[Outcome]()
        assert wait_until(lambda: found.extend(writer.outcomes()) or len(found) == 2, LONG)
        submit(writer, 3)
        writer.snapshot(4, {"a": Block.whole(torch.ones(1))}, {"step": 4}, {})
        found += writer.outcomes()
        within(60, lambda: writer.wants_another_try() or None)
    assert [outcome.step for outcome in found] == [1, 2, 3, 4]
    assert all(isinstance(outcome.error, WriterDied) and outcome.error.fix for outcome in found)
    assert "cannot be started (Resource temporarily unavailable) before step 3" in str(found[2].error)
    submit(writer, 5)
    within(60, writer.wait)
    assert [(outcome.step, outcome.error) for outcome in writer.outcomes()] == [(5, None)]


def test_the_first_worker_learns_of_what_another_could_not_start(
    settings: WriterSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process would wait for that part as long as its patience lasts."""
    barrier, said = threading.Barrier(2), [None, None]
    writer_locks = [
        CheckpointWriter(
            replace(settings, rank=rank, workers=2, patience_seconds=1e6), partial(gather, barrier, said, rank)
        )
        for rank in (0, 1)
    ]
    real, refused = subprocess.Popen, list[int]()

    def fail_once(*arguments: Any, **more: Any) -> Any:
        if refused:
            return real(*arguments, **more)
        refused.append(1)
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    def save(rank: int) -> str:
        if rank == 1:
            os.kill(pid(writer_locks[1]), signal.SIGSTOP)
        submit(writer_locks[rank], 1)
        if rank == 1:
            os.kill(pid(writer_locks[1]), signal.SIGKILL)
        with pytest.raises(CheckpointError) as raised:
            writer_locks[rank].wait()
        submit(writer_locks[rank], 2)
        writer_locks[rank].wait()
        writer_locks[rank].close()
        return raised.value.what

    monkeypatch.setattr(writer_client.subprocess, "Popen", fail_once)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(save, (0, 1))
    assert refused
    assert "worker 1 has not written its part: the process that writes" in first and "died (signal 9)" in second
    assert CheckpointStore(settings.directory).verify(2).good


def gather(barrier: threading.Barrier, said: list[Any], rank: int, what: Any) -> list[Any]:
    said[rank] = what
    barrier.wait(LONG)
    everyone = list(said)
    barrier.wait(LONG)
    return everyone


def test_a_thread_that_cannot_be_started_is_as_a_process_that_cannot(
    writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("can't start new thread")

    os.kill(pid(writer), signal.SIGKILL)
    process = writer._saves.process
    assert wait_until(lambda: process.ended, LONG)
    writer.get_ready({name: Block.whole(tensor) for name, tensor in make_state(1).items()})  # with a thread of its own
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        submit(writer, 1)
    assert ["can't start new thread" in str(outcome.error) for outcome in writer.outcomes()] == [True]


# Signs of life


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_it_is_told_again_and_again_that_cut_tensors_are_read(
    sealed: bool, axis: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the pieces follow one another in the whole or not; and while a checkpoint that is there is verified."""
    key = None
    if sealed:
        pytest.importorskip("cryptography")
        monkeypatch.setenv("HEADWAY_ENCRYPTION_KEY", "ab" * 32)
        key = bytes.fromhex("ab" * 32)
    monkeypatch.setattr(publish, "_READ_BYTES", 64)
    whole = torch.arange(32 * 32, dtype=torch.float32).reshape(32, 32)

    def finish(advance: Callable[[], None]) -> Any:
        publisher = Publisher(tmp_path)
        folder, parts = publisher.begin(1, "a"), []
        for rank, half in enumerate(whole.chunk(2, axis)):
            offset = (16 * rank, 0) if axis == 0 else (0, 16 * rank)
            piece, data = Piece.of("a", Block(half, offset, (32, 32))), half.contiguous().numpy().tobytes()
            source = Elements(lambda _, data=data: memoryview(data))  # type: ignore[misc]
            parts.append(write_part(folder, plan_files([piece], rank, 2**20), source, key=key))
        return publisher.finish(folder, parts, {"step": 1}, {}, advance)

    calls: list[int] = []
    manifest = finish(lambda: calls.append(1))
    assert len(calls) > 4096 / 64, "by how much was read, not by tensor"
    store = CheckpointStore(tmp_path)
    assert torch.equal(store.load(store.info(1))["a"], whole) and store.verify(1).good
    first = len(calls)
    assert finish(lambda: calls.append(1)) == manifest
    assert len(calls) - first == first + 2, "a word for each file that is there"


def test_a_process_that_finishes_a_checkpoint_says_that_it_gets_on(
    settings: WriterSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, given = Publisher.finish, []

    def look(*arguments: Any) -> Any:
        given.append(arguments[5])
        return finish(*arguments)

    monkeypatch.setattr(Publisher, "finish", look)
    process = writer_process.WriterService(settings, open(os.devnull, "w"))  # noqa: SIM115, PTH123
    monkeypatch.setattr(writer_process, "StagedFiles", lambda *_: None)
    process.write(SaveJob(1, 1, "a", 0, (), {"step": 1}, {}))
    assert given == [process.answers.report_progress]


# Neighbours that fail


@pytest.mark.parametrize("full", [False, True])
def test_that_a_part_will_not_come_is_told_with_its_reason_or_without_never_with_half_of_it(
    full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure, seen = tmp_path / failure_name(1), list[bool]()

    def write(path: Path, text: str, **_: str) -> None:
        path.touch()
        seen.append(failure.exists())
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        path.write_bytes(text.encode())

    monkeypatch.setattr(Path, "write_text", write)
    writer_process.leave_failure(tmp_path, 1, "it died")
    assert seen == [False] and failure.read_text() == ("" if full else "it died")


# Neighbours that are late


def flush_snapshot(folder: Path, rank: int, late_seconds: float = 0.0, **knows: Any) -> list[int]:
    """The steps that one of two processes writes, both of which hold the same one."""
    written = list[int]()
    states = MemorySnapshots(folder, rank, 2, **knows)
    states.add(SaveJob(1, 110, "attempt-1", 1, (), {}, {}))
    time.sleep(late_seconds)
    states.flush_snapshot(-1, lambda order: written.append(order.step))
    return written


def test_a_process_that_lives_is_waited_for_however_late_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_snapshot, "_MEETING_SECONDS", 0.2)
    with ThreadPoolExecutor(2) as pool:
        found = [
            pool.submit(flush_snapshot, tmp_path, rank, late, has_ended=lambda _: False)
            for rank, late in ((0, 1.0), (1, 0))
        ]
        assert [future.result() for future in found] == [[110], [110]]


@pytest.mark.parametrize("knows", [{"has_ended": lambda rank: None}, {"has_ended": lambda rank: True}])
def test_of_which_that_is_not_known_or_which_is_gone_is_not(
    knows: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_snapshot, "_MEETING_SECONDS", 0.2)
    assert flush_snapshot(tmp_path, 1, **knows) == []


def test_the_patience_with_a_process_that_lives_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_snapshot, "_MEETING_SECONDS", 1e6)
    assert flush_snapshot(tmp_path, 1, has_ended=lambda rank: False, patience_seconds=0.2) == []


@pytest.mark.parametrize("made_anew", [False, True])
def test_nobody_is_waited_for_in_a_folder_that_was_moved_away(tmp_path: Path, made_anew: bool) -> None:
    """The one may have met in the old folder, the other waits in the new one: for minutes, while nothing can begin."""
    folder, states = tmp_path / "checkpoints", {}
    looks: list[int] = []

    def move_away(rank: int) -> bool:
        looks.append(rank)
        if len(looks) == 3:
            folder.rename(tmp_path / "elsewhere")
            if made_anew:
                folder.mkdir()
        assert len(looks) < 50, "it waits for ever"
        return False

    for rank in (0, 1):
        looks.clear()
        shutil.rmtree(tmp_path / "elsewhere", ignore_errors=True)
        states[rank] = MemorySnapshots(folder, rank, 2, move_away)
        states[rank].add(SaveJob(1, 110, "attempt-1", 1, (), {}, {}))
        states[rank].flush_snapshot(-1, lambda order: pytest.fail("nobody else has it"))


@pytest.mark.parametrize(("fails", "rescued"), [(True, {0: 18, 1: 18}), (False, {})])
def test_a_save_that_failed_for_the_first_worker_hides_no_state_that_all_hold(
    fails: bool, rescued: dict[int, int], settings: WriterSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker has written its part of it, and cannot know that it was for nothing."""
    written: dict[int, int] = {}

    def publish_unless_it_fails(process: Any, order: Any, *_: Any) -> Any:
        if order.step == 20 and fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        written[0] = order.step
        return SimpleNamespace(total_bytes=0)

    def write_part_of(process: Any, order: Any, *_: Any) -> None:
        written[1] = order.step

    monkeypatch.setattr(writer_process, "StagedFiles", lambda *_: None)
    monkeypatch.setattr(writer_process.WriterService, "_publish", publish_unless_it_fails)
    monkeypatch.setattr(writer_process.WriterService, "_contribute", write_part_of)
    processes = [
        writer_process.WriterService(replace(settings, workers=2, rank=rank), io.StringIO()) for rank in (0, 1)
    ]
    for process in processes:
        process._snapshots._has_ended = lambda rank: False
        process._store.after_save = lambda manifest: None  # type: ignore[method-assign]
        process.handle(HoldSnapshot(SaveJob(1, 18, "attempt-1", 1, (), {}, {})))
        process.handle(Write(SaveJob(2, 20, "attempt-1", 2, (), {}, {})))
    written.clear()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda process: process.flush_snapshot(), processes))
    assert written == rescued


def test_whether_a_process_lives_is_known_on_its_own_machine_only(
    settings: WriterSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence = Fence(tmp_path, Owner.this_process(1))
    process = writer_process.WriterService(replace(settings, fence=fence, workers=2), io.StringIO())
    assert process._snapshots._has_ended(1) is None, "it has not begun"
    lock = open_writer_lock(tmp_path, 1)
    assert process._snapshots._has_ended(1) is False
    os.close(lock)
    assert process._snapshots._has_ended(1) is True
    monkeypatch.setattr(writer_locks, "host_name", lambda: "elsewhere")
    assert process._snapshots._has_ended(1) is None
    assert process._snapshots._patience_seconds == settings.patience_seconds
