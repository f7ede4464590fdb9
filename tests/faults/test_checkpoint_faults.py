"""Kills and full disks in the middle of a save: what is found afterwards is the old state or the new one, whole.

Kills are real (SIGKILL), in forked children, which makes hundreds of them cheap.
"""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.checkpoint.format import folders
from headway.checkpoint.save.messages import WriterSettings
from headway.checkpoint.save.writer import CheckpointWriter
from headway.checkpoint.store import CheckpointStore
from headway.core.errors import CheckpointError
from headway.core.process import faults
from headway.core.types import Block
from headway.run.directory.run_directory import Attempt, RunDirectory
from support.runs import in_child
from support.states import equal, make_state, names, save

POINTS = ("shard", "manifest", "rename", "replace", "prune", "discard")


def assert_whole(store: CheckpointStore, *states: tuple[int, int]) -> tuple[int, int]:
    """The newest checkpoint must hold one of the given states (step, seed), bit for bit; returns which."""
    said: list[str] = []
    info = store.newest(said.append)
    assert said == [], "nothing that can be found may be damaged"
    assert info is not None
    found = store.load(info)
    matches = [(step, seed) for step, seed in states if step == info.step and equal(found, make_state(seed))]
    assert len(matches) == 1, f"step {info.step} holds none of the states that were saved"
    return matches[0]


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """Keeps one, in several files, and has saved step 1."""
    store = CheckpointStore(tmp_path / "checkpoints", keep=1, max_shard_bytes=100)
    save(store, 1)
    return store


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_point_of_a_save_leaves_the_old_or_the_new(
    store: CheckpointStore, point: str, count: int
) -> None:
    status = in_child(lambda: save(store, 2), f"kill@checkpoint.{point}:{count}")
    reached = point == "shard" or (count == 1 and point != "replace")
    assert status == (-signal.SIGKILL if reached else 0)
    expected = (1, 1) if point in ("shard", "manifest", "rename") and reached else (2, 2)
    assert assert_whole(store, (1, 1), (2, 2)) == expected

    save(store, 3)
    assert_whole(store, (3, 3))
    assert names(store.directory) == ["step-00000003"], "the next save clears away what the killed one left"


def swap_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that cannot swap two names in one call."""
    monkeypatch.setattr(folders, "exchange", lambda one, other: False)


@pytest.mark.parametrize(
    ("point", "swaps"),
    [
        *((point, True) for point in POINTS if point not in ("replace", "prune")),
        *((point, False) for point in POINTS if point != "prune"),
    ],
)
def test_a_kill_while_a_step_is_replaced_leaves_one_of_its_two_states(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, point: str, swaps: bool
) -> None:
    if not swaps:
        swap_no_names(monkeypatch)
    assert in_child(lambda: save(store, 1, seed=7), f"kill@checkpoint.{point}") == -signal.SIGKILL
    expected = (1, 7) if point == "discard" else (1, 1)
    assert assert_whole(store, (1, 1), (1, 7)) == expected
    assert store.info(1).step == 1

    save(store, 1, seed=7)
    assert_whole(store, (1, 7))
    assert names(store.directory) == ["step-00000001"]


@pytest.mark.slow
def test_kills_at_random_moments_never_lose_what_was_saved(tmp_path: Path) -> None:
    """A child saves step after step, and sometimes a step again, until it is killed; the next goes on from there."""
    store = CheckpointStore(tmp_path / "checkpoints", keep=2, max_shard_bytes=100)
    save(store, 1)
    generator = random.Random(0)
    step = 1
    for _ in range(60):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            for following in range(step + 1, step + 10_000):
                save(store, following)
                if following % 3 == 0:
                    save(store, following, seed=-following)
                os.write(writer, b".")
            os._exit(0)
        os.close(writer)
        saved = os.read(reader, 1)  # the moments are random from here on, so a slow machine does not kill all too early
        time.sleep(generator.uniform(0.0, 0.03))
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        os.close(reader)
        newest = store.list()[-1].step
        found, _ = assert_whole(store, (newest, newest), (newest, -newest))
        assert found >= step + len(saved), "a kill took away a checkpoint that was there before"
        step = found


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("replacing", [False, True])
def test_a_disk_that_is_full_at_any_point(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, point: str, replacing: bool
) -> None:
    if point == "replace":
        swap_no_names(monkeypatch)
    step, seed = (1, 7) if replacing else (2, 2)
    monkeypatch.setenv("HEADWAY_FAULTS", f"enospc@checkpoint.{point}")
    monkeypatch.setattr(faults, "_passed", type(faults._passed)())
    old_kept = point in ("shard", "manifest", "rename") or (replacing and point == "replace")
    if old_kept:
        with pytest.raises(CheckpointError, match="cannot be written: No space left on device"):
            save(store, step, seed)
    else:
        save(store, step, seed)  # removing old ones is no reason to end a run
    monkeypatch.delenv("HEADWAY_FAULTS")
    assert assert_whole(store, (1, 1), (step, seed)) == ((1, 1) if old_kept else (step, seed))
    save(store, step, seed)
    assert_whole(store, (step, seed))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 4 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mount)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted here")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    store = CheckpointStore(small_disk / "checkpoints")
    save(store, 1)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(small_disk).free))
    with pytest.raises(CheckpointError) as error:
        save(store, 2)
    assert "step 2 cannot be written: No space left on device" in error.value.what
    assert "the checkpoint of step 1 is untouched" in error.value.what
    assert "B needed, 0 B free" in str(error.value.where)
    assert error.value.exit_code == 4
    assert names(store.directory) == ["step-00000001"], "the failed save gave its space back"
    assert_whole(store, (1, 1))
    filler.unlink()
    save(store, 2)
    assert_whole(store, (2, 2))


def test_a_disk_that_turns_read_only(small_disk: Path) -> None:
    """As the kernel does with a file system that it no longer trusts."""
    writer = CheckpointWriter(WriterSettings(small_disk / "checkpoints"))
    try:
        for step, mode in ((1, "rw"), (2, "ro"), (3, "rw")):
            subprocess.run(["mount", "-o", f"remount,{mode}", str(small_disk)], check=True)
            state = {name: Block.whole(tensor) for name, tensor in make_state(step).items()}
            writer.submit(step, state, {"step": step}, {"attempt": 1})
            if mode == "ro":
                with pytest.raises(CheckpointError, match="step 2 cannot be written: Read-only file system"):
                    writer.wait()
            else:
                writer.wait()
        assert [outcome.error is None for outcome in writer.outcomes()] == [True, False, True]
    finally:
        writer.close()
    assert_whole(CheckpointStore(small_disk / "checkpoints"), (3, 3))
    assert names(small_disk / "checkpoints") == ["step-00000001", "step-00000003"]


def test_a_limit_on_the_size_of_files(store: CheckpointStore) -> None:
    """As a full disk where mounting is not permitted: the kernel refuses the write (EFBIG)."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
        save(store, 2)

    assert in_child(limited) == 4
    assert names(store.directory) == ["step-00000001"]
    assert_whole(store, (1, 1))


OWNER = """
import sys, time
from pathlib import Path
from headway.run.directory.run_directory import RunDirectory
attempt = RunDirectory(Path(sys.argv[1])).begin_attempt("owner")
print(attempt.number, flush=True)
time.sleep(60)
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that owns the run."""
    command = [sys.executable, "-c", OWNER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "1\n"
        yield process
        process.kill()


def test_a_run_in_use_by_another_process_is_refused_until_that_dies(
    tmp_path: Path, owner: subprocess.Popen[str]
) -> None:
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(CheckpointError, match=f"in use by attempt 1, process {owner.pid} on"):
        run.begin_attempt("second")
    owner.kill()
    owner.wait()
    attempt = run.begin_attempt("second")
    assert attempt.number == 2
    assert run.attempt_records()[0]["outcome"] == "died"
    attempt.finish("finished", 0)


def test_a_worker_that_outlives_its_attempt_cannot_publish(tmp_path: Path, owner: subprocess.Popen[str]) -> None:
    """It passed the first check, and was still writing when the run was taken over."""
    run = RunDirectory(tmp_path / "run")
    zombie = Attempt.join(run.path, 1)
    calls = 0

    def take_over_meanwhile() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            owner.kill()
            owner.wait()
            run.begin_attempt("second").finish("finished", 0)
        zombie.assert_current()

    with pytest.raises(CheckpointError, match="attempt 1 no longer owns this run"):
        save(CheckpointStore(run.checkpoints, may_write=take_over_meanwhile), 1)
    assert names(run.checkpoints) == []
