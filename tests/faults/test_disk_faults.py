"""Whole trainings on disks that misbehave: they go on, say so, save again when they can, and end in the same state."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headway.checkpoint.store import CheckpointStore
from headway.core.files.reserve import RESERVE_BYTES, RESERVE_FILE
from headway.core.process.waiting import wait_until
from headway.run.directory.ledger_proof import prove
from headway.telemetry.metrics import read_metrics
from headway.tracking.alert_rules import firing
from headway.tracking.exporter import exposition
from headway.tracking.live_run import LiveRun
from headway.tracking.runs_folder import RunsFolder
from support.runs import PATIENCE, headway, start_headway, state_hash, stopped_worker, write_config
from support.waits import LONG

#: Ends a file system as a cable that is pulled does (`EXT4_IOC_SHUTDOWN`, without writing what is in memory).
_SHUTDOWN, _NO_FLUSH = 0x8004587D, 2
BOTH = [1, pytest.param(2, marks=pytest.mark.slow)]


class Disk:
    """A file system of its own on a file, which can be made to fail as disks do."""

    def __init__(self, folder: Path) -> None:
        self.path, self._shard_file = folder / "disk", folder / "image"
        self.path.mkdir()
        with self._shard_file.open("wb") as file:
            file.truncate(32 * 2**20)
        quietly("mkfs.ext4", "-q", "-F", "-b", "1024", "-O", "^has_journal", str(self._shard_file))
        self.mount()

    def mount(self) -> None:
        quietly("mount", "-o", "loop,errors=remount-ro", str(self._shard_file), str(self.path))
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
        self._device = next(device for device, place, *_ in mounts if place == str(self.path))

    def unmount(self) -> None:
        quietly("umount", str(self.path))

    def sync(self) -> None:
        """Of this file system only: that of the machine may take minutes where others write."""
        folder = os.open(self.path, os.O_RDONLY)
        assert ctypes.CDLL(None, use_errno=True).syncfs(folder) == 0, os.strerror(ctypes.get_errno())
        os.close(folder)

    def turn_read_only(self) -> None:
        """By itself, as the kernel does when it no longer trusts a file system."""
        Path(f"/sys/fs/ext4/{Path(self._device).name}/trigger_fs_error").write_text("1")

    def break_down(self) -> None:
        """Every call is answered with EIO."""
        folder = os.open(self.path, os.O_RDONLY)
        fcntl.ioctl(folder, _SHUTDOWN, struct.pack("I", _NO_FLUSH))
        os.close(folder)

    def hang(self) -> None:
        """Writes wait."""
        quietly("fsfreeze", "--freeze", str(self.path))

    def go_on(self) -> None:
        quietly("fsfreeze", "--unfreeze", str(self.path))

    def fill(self) -> None:
        """With what was reserved for records, too."""
        for reserve in self.path.rglob(RESERVE_FILE):
            reserve.unlink()
        self.fill_rest()

    def fill_rest(self) -> None:
        with pytest.raises(OSError), (self.path / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(64 if shutil.disk_usage(self.path).free < 2**16 else 2**14))

    def make_room(self) -> None:
        (self.path / "filler").unlink()


class DiskInMemory(Disk):
    """A file system in memory, with room for a few states of a larger model."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "disk"
        self.path.mkdir()
        quietly("mount", "-t", "tmpfs", "-o", "size=72m", "tmpfs", str(self.path))


def quietly(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture(params=[Disk])
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Disk]:
    try:
        disk = request.param(tmp_path)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("file systems cannot be made and mounted here")
    yield disk
    subprocess.run(["fsfreeze", "--unfreeze", str(disk.path)], capture_output=True, check=False)
    subprocess.run(["umount", "--lazy", str(disk.path)], capture_output=True, check=False)


class Training:
    """`headway train` in a process of its own, whose words are read while it goes.

    Args:
        run: Its directory.
        stops: Which saves, counted from 1, the first worker stops itself before: its state is staged, nothing is
            written. So a test has all the time that it needs.
    """

    def __init__(self, config: Path, run: Path, *more: str, stops: tuple[int, ...]) -> None:
        self._run = run
        faults = ",".join(["slow@step=1", *(f"freeze@checkpoint.stage:{save}%0" for save in stops)])
        several = "-w" in more and "1" not in more
        self._process = start_headway("train", config, *more, faults=faults, before=PATIENCE, strategies=several)
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        self.said.extend(self._process.stderr)

    def until(self, text: str) -> None:
        assert wait_until(lambda: any(text in line for line in self.said), LONG), self.said

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """While the worker is stopped before a save, and the first checkpoint is there."""
        worker = stopped_worker(self._run)
        assert wait_until((self._run / "checkpoints/step-00000004").is_dir, LONG), self.said
        try:
            yield
        finally:
            os.kill(worker, signal.SIGCONT)

    def end(self) -> tuple[int, str]:
        """Its exit code, and all that it has said."""
        try:
            code = self._process.wait(LONG)
        finally:
            self._process.kill()
        self._reader.join()
        return code, "".join(self.said)


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the state at the end of the run that nothing disturbs, with however many workers."""
    folder = tmp_path_factory.mktemp("whole")
    data = {"store": str(corpus / "store"), "sources": [str(corpus / "corpus.jsonl")]}
    done = headway("train", write_config(folder, data=data, **_sections(folder / "runs")))
    assert done.returncode == 0, done.stderr
    return state_hash(folder / "runs" / "tiny")


def _sections(runs: Path, **supervise: float) -> dict[str, Any]:
    return {
        "runs": str(runs),
        "determinism": "elastic",
        "train": {"steps": 16},
        "checkpoint": {"every": "4 steps"},
        "supervise": {"max_failures": 0, **supervise},
        "telemetry": {"report": False, "alert": f"cat >> '{runs.parent.parent}/alerts.jsonl'"},
    }


def words(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def alerts(folder: Path) -> str:
    """What was told so far; nothing yet where the file is not made, for telling takes a process of its own."""
    lines = words(folder / "alerts.jsonl").splitlines()
    return "\n".join(json.loads(line)["what"] for line in lines)


def assert_sound(run: Path, state: str) -> None:
    """All steps are recorded once, what is saved is whole, and the end is that of the run that nothing disturbed."""
    assert state_hash(run) == state
    assert read_metrics(run).series("train/loss")[0].tolist() == list(range(1, 17))
    assert_whole(run)
    assert prove(run).problems == []


def assert_whole(run: Path) -> None:
    store = CheckpointStore(run / "checkpoints")
    assert store.folders() and all(store.verify(folder).good for folder in store.folders())


@pytest.mark.slow
def test_a_broken_disk_under_some_saves(tiny: Callable[..., Path], tmp_path: Path, whole: str) -> None:
    """With two workers: under a file of the second one, then under the manifest, which the first one writes."""
    config = tiny(**_sections(tmp_path / "disk" / "runs"))
    faults = "eio@checkpoint.shard:2%1,eio@checkpoint.manifest:2%0"
    done = headway("train", config, "-w", "2", faults=faults)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "disk/runs/tiny"
    assert read_metrics(run).series("checkpoint/failed_step")[1].tolist() == [8.0, 12.0]
    for step in (8, 12):
        said = f"training continues without a checkpoint of step {step}: "
        assert said in done.stderr and said in alerts(tmp_path)
    assert done.stderr.count("Input/output error") == 2 and "the checkpoint of step 4 is untouched" in done.stderr
    assert len(list(run.glob("attempts/*"))) == 1
    assert_sound(run, whole)


@pytest.mark.parametrize("workers", BOTH)
def test_a_disk_that_is_full_for_a_while(
    tiny: Callable[..., Path], tmp_path: Path, disk: Disk, whole: str, workers: int
) -> None:
    config = tiny(**_sections(disk.path / "runs"))
    run = disk.path / "runs/tiny"
    training = Training(config, run, "-w", str(workers), "telemetry.state_hash_every=1", stops=(2, 4))
    with training.stopped():
        disk.fill()
    with training.stopped():  # the save before last has ended: there is room for two states
        disk.make_room()
    code, said = training.end()
    assert code == 0, said
    assert said.count("No space left on device") >= 3, "metrics, hashes, a checkpoint"
    assert "the hashes of step" in said and "metrics are written again" in said and "Traceback" not in said
    assert "without a checkpoint" in alerts(tmp_path) and "metrics cannot be written" in alerts(tmp_path)
    assert len(read_metrics(run).series("checkpoint/failed_step")[1]) >= 1
    assert_sound(run, whole)


#: Its states of 13 MB do not fit into what is reserved for records.
LARGER = {"dim": 192, "layers": 2, "heads": 4, "kv_heads": 4, "ffn_dim": 512, "dropout": 0.1}


@pytest.mark.parametrize("disk", [DiskInMemory], indirect=True)
@pytest.mark.parametrize(("scheduler", "workers"), [(False, 1), pytest.param(True, 2, marks=pytest.mark.slow)])
def test_a_disk_that_stays_full_ends_the_run(
    tiny: Callable[..., Path],
    tmp_path: Path,
    disk: Disk,
    scheduler: bool,
    workers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Readers learn of failed saves, all steps are recorded, and once there is room the same command continues."""
    sections = {
        **_sections(disk.path / "runs"),
        "model": LARGER,
        "train": {"steps": 14},
        "checkpoint": {"every": "1 steps", "keep": 1, "max_failed_saves": 5},
    }
    if scheduler:
        monkeypatch.setenv("METAFLOW_RUN_ID", "1")
    config, run = tiny(**sections), disk.path / "runs/tiny"
    more = ("-w", str(workers))
    assert headway("train", config, f"runs={tmp_path / 'whole'}", *more).returncode == 0
    training = Training(config, run, *more, stops=(3, 8))
    worker = stopped_worker(run)
    assert (run / RESERVE_FILE).stat().st_blocks * 512 >= RESERVE_BYTES
    disk.fill_rest()
    os.kill(worker, signal.SIGCONT)
    worker = stopped_worker(run)
    snapshot = LiveRun(run).refresh()
    assert snapshot.values["run/save_failures"] >= 3 and snapshot.values["run/failed_saves_in_row"] >= 3
    assert "HeadwaySaveFailing" in [alert.name for alert in firing(snapshot, time.time())]
    exposed = exposition(RunsFolder(run.parent)).decode()
    assert float(exposed.partition('headway_run_save_failures_total{run="tiny"} ')[2].split()[0]) >= 3
    assert not (run / RESERVE_FILE).exists() and read_metrics(run).last_step >= 6, "the reserve is used for records"
    os.kill(worker, signal.SIGCONT)
    code, said = training.end()
    assert code == (75 if scheduler else 4), said
    error = said[said.index("\nerror: ") + 1 :]
    assert error.startswith("error: 5 saves in a row have failed")
    # A full disk may have no room for the reason of the second worker.
    assert "No space left on device" in error or (workers > 1 and "as on a full disk" in error)
    last = read_metrics(run).last_step
    assert last < 14 and "metrics cannot be written" not in said and "cannot be recorded" not in said
    kept = max(int(folder.name[5:]) for folder in (run / "checkpoints").glob("step-*"))
    assert f"steps {kept + 1} to {last} are lost" in error and f"it continues from step {kept}" in error
    assert ("on another machine" in error) == scheduler and "make room there" in error
    assert "5 saves in a row have failed" in alerts(tmp_path)
    assert len(list(run.glob("attempts/*"))) == 1
    ended = json.loads((run / "attempts/001/attempt.json").read_text())
    assert (ended["exit_code"], ended["error"]) == (code, "SavesFailed" if scheduler else "CheckpointError")
    if scheduler:  # the disk is as full for whoever comes next
        again = headway("train", config, *more)
        assert again.returncode == 4 and "cannot be reserved" in again.stderr, again.stderr
    disk.make_room()
    again = headway("train", config, *more)
    assert again.returncode == 0 and f"step-{kept:08d}" in again.stderr, again.stderr
    assert state_hash(run) == state_hash(tmp_path / "whole/tiny")
    assert read_metrics(run).series("train/loss")[0].tolist() == list(range(1, 15))
    assert prove(run).problems == []
    assert not (run / RESERVE_FILE).exists(), "a run that has ended needs none"


@pytest.mark.slow
@pytest.mark.parametrize("workers", BOTH)
@pytest.mark.parametrize(
    ("fails", "why"),
    [
        (Disk.turn_read_only, "Read-only file system"),
        pytest.param(Disk.break_down, "Input/output error", marks=pytest.mark.slow),
    ],
)
def test_a_disk_that_fails_for_good(
    tiny: Callable[..., Path],
    tmp_path: Path,
    disk: Disk,
    whole: str,
    workers: int,
    fails: Callable[[Disk], None],
    why: str,
) -> None:
    """It trains to the end, since the disk might come back; what is lost then is said, and the exit code is 4."""
    config = tiny(**_sections(disk.path / "runs"))
    run = disk.path / "runs/tiny"
    training = Training(config, run, "-w", str(workers), stops=(2,))
    with training.stopped():
        disk.sync()
        fails(disk)
    code, said = training.end()
    assert code == 4, said
    assert "step 16/16" in said and "Traceback" not in said
    for step in (8, 12, 16):
        assert f"training continues without a checkpoint of step {step}: " in said
    error = said[said.index("\nerror: ") + 1 :]
    assert error.startswith("error: the checkpoint of step 16 cannot be written") and why in error and "fix:" in error
    assert "records are missing" in said and "the outcome of attempt 1 cannot be recorded" in said
    assert "the checkpoint of step 16 cannot be written" in alerts(tmp_path)
    disk.unmount()
    disk.mount()
    assert_whole(run)  # what was there before
    again = headway("train", config, "-w", str(workers))
    assert again.returncode == 0 and "step-00000004" in again.stderr, again.stderr
    assert_sound(run, whole)


@pytest.mark.slow
@pytest.mark.parametrize("workers", BOTH)
def test_a_disk_that_hangs_for_a_while(
    tiny: Callable[..., Path], tmp_path: Path, disk: Disk, whole: str, workers: int
) -> None:
    """Steps go on, though it is longer than a worker may be silent, until there is no room for a further state."""
    config = tiny(**_sections(disk.path / "runs", hang_seconds=20.0, save_seconds=240.0))
    run = disk.path / "runs/tiny"
    training = Training(config, run, "-w", str(workers), stops=(2,))
    with training.stopped():
        disk.hang()
    training.until("step 10/16")
    if workers == 1:  # several wait for each other by then, with a sign of life every second
        training.until("in phase 'checkpoint', which may take 4 m 0 s")
        assert wait_until(lambda: "gave no sign of life" in alerts(tmp_path), LONG)
    threading.Timer(21.0 if workers > 1 else 1.0, disk.go_on).start()
    code, said = training.end()
    assert code == 0, said
    assert "missing in" not in said, "what has waited is written"
    assert len(list(run.glob("attempts/*"))) == 1, "nobody was taken for hung"
    assert not list(run.glob("attempts/*/stack-*")), "nobody was asked for what would have to wait for the disk"
    if workers == 1:
        assert "in phase 'checkpoint'" in (run / "attempts/001/supervisor.log").read_text()
    assert_sound(run, whole)


@pytest.mark.slow
def test_a_write_that_hangs_is_given_up(tiny: Callable[..., Path], tmp_path: Path, whole: str) -> None:
    config = tiny(**_sections(tmp_path / "disk" / "runs", hang_seconds=15.0, save_seconds=30.0))
    done = headway("train", config, faults="hang@checkpoint.shard:2")
    assert done.returncode == 0, done.stderr
    assert "training continues without a checkpoint of step 8: the disk seems to hang" in done.stderr
    run = tmp_path / "disk/runs/tiny"
    assert "the disk seems to hang" in alerts(tmp_path) and len(list(run.glob("attempts/*"))) == 1
    assert read_metrics(run).series("checkpoint/failed_step")[1].tolist() == [8.0]
    assert_sound(run, whole)
