"""The process beside a worker: training goes on while it writes, and whatever happens to it."""

import errno
import fcntl
import io
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from headway.checkpoint.post_save import MaintainerSettings
from headway.checkpoint.remote.relay import Relay
from headway.checkpoint.remote_copies import TierAccess
from headway.checkpoint.run_identity import RunIdentity
from headway.checkpoint.save import memory_snapshot, writer_locks, writer_process
from headway.checkpoint.save.fence import Fence, Fenced
from headway.checkpoint.save.memory_snapshot import MemorySnapshots
from headway.checkpoint.save.messages import FailPart, SaveJob, WriterSettings
from headway.checkpoint.save.outstanding_saves import OutstandingSaves
from headway.checkpoint.save.parts import note_name
from headway.checkpoint.save.writer import CheckpointWriter
from headway.checkpoint.save.writer_locks import (
    is_marked_lost,
    mark_lost,
    open_writer_lock,
    wait_for_writers,
    writer_has_ended,
)
from headway.checkpoint.store import CheckpointStore
from headway.config import Config, TrainConfig
from headway.core import console
from headway.core.coordination.heartbeat import Phase
from headway.core.coordination.lease import OWNER_FILE
from headway.core.coordination.owner import Owner
from headway.core.errors import CheckpointError, ConfigError
from headway.core.files.atomic import write_json
from headway.core.process.waiting import wait_until
from headway.core.types import Block, StateBlocks
from headway.parallel.world import World
from headway.run.directory.rewind import CheckpointRewinder
from support.states import blocks, equal, make_state, names, save, submit
from support.waits import LONG


def test_states_are_saved_as_they_were_when_they_were_handed_over(
    writer: CheckpointWriter, settings: WriterSettings
) -> None:
    """The third has to wait until one of two buffers is free; the state changes at once."""
    state = make_state(0)
    for step in (1, 2, 3, 4):
        for name, tensor in make_state(step).items():
            state[name].copy_(tensor)
        writer.submit(step, blocks(state), {"step": step}, {"attempt": 1})
        for tensor in state.values():
            tensor.zero_()
    writer.wait()
    outcomes = writer.outcomes()
    assert [(o.step, o.error) for o in outcomes] == [(step, None) for step in (1, 2, 3, 4)]
    assert all(o.seconds > 0 and o.bytes > 0 for o in outcomes) and writer.outcomes() == []
    writer.close()  # old ones are removed after a new one was told of
    store = CheckpointStore(settings.directory)
    assert [info.step for info in store.list()] == [2, 3, 4], "as many are kept as are asked for"
    for info in store.list():
        assert store.verify(info.step).good and equal(store.load(info), make_state(info.step))


def test_what_is_written_is_encrypted_when_it_is_to_be(
    settings: WriterSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setenv("HEADWAY_ENCRYPTION_KEY", "ab" * 32)
    writer = CheckpointWriter(replace(settings, encrypt=True))
    submit(writer, 1)
    writer.close()
    assert [o.error for o in writer.outcomes()] == [None]
    store = CheckpointStore(settings.directory)
    assert names(store.info(1).path) == ["manifest.json", "shard-00000.safetensors.sealed"]
    assert store.verify(1).good and equal(store.load(store.info(1)), make_state(1))


def test_a_state_that_grows_is_saved_whole(writer: CheckpointWriter, settings: WriterSettings) -> None:
    writer.submit(1, blocks({"a": torch.ones(3)}), {"step": 1}, {})
    larger = {"a": torch.ones(3), "b": torch.arange(10_000)}
    writer.submit(2, blocks(larger), {"step": 2}, {})
    writer.close()
    store = CheckpointStore(settings.directory)
    assert equal(store.load(store.info(2)), larger) and equal(store.load(store.info(1)), {"a": torch.ones(3)})


def test_closing_saves_what_was_handed_over(settings: WriterSettings) -> None:
    writer = CheckpointWriter(settings)
    submit(writer, 1)
    writer.close()
    writer.close()
    assert [o.error for o in writer.outcomes()] == [None] and CheckpointStore(settings.directory).verify(1).good


def test_who_is_told_to_stop_does_not_wait_for_a_store(
    settings: WriterSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A finished run waits for its last upload, which may take long, and a machine that goes does not wait."""
    monkeypatch.setattr("headway.checkpoint.save.writer._LEAVING_SECONDS", 0.5)
    monkeypatch.setenv("HEADWAY_FAULTS", "freeze@upload.manifest")
    monkeypatch.setattr("headway.checkpoint.save.writer_client.continue_stopped", lambda pid: None)  # as one that sends
    (tmp_path / "remote").mkdir()
    remote = {"url": f"file://{tmp_path}/remote"}
    run = settings.directory.parent
    config = Config(name=run.name, runs=run.parent, train=TrainConfig(steps=1), checkpoint={"remote": remote})
    writer = CheckpointWriter(replace(settings, after_save=MaintainerSettings.of(config, 1)))
    submit(writer, 1)
    writer.wait()
    assert not list(tmp_path.glob("remote/**/manifest.json"))
    writer.close(hurried=lambda: True)
    assert "stop requested: the newest checkpoint is not uploaded" in capsys.readouterr().err


@pytest.mark.parametrize("fault", ["kill@checkpoint.shard", "kill@checkpoint.rename", "eio@checkpoint.shard"])
def test_a_save_that_fails_is_told_and_the_next_one_is_tried(
    settings: WriterSettings, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv("HEADWAY_FAULTS", fault)
    writer = CheckpointWriter(settings)
    submit(writer, 1)
    with pytest.raises(CheckpointError, match="died" if "kill" in fault else "Input/output error"):
        writer.wait()
    assert [o.error is None for o in writer.outcomes()] == [False]
    submit(writer, 2)
    writer.wait()
    assert [o.error for o in writer.outcomes()] == [None]
    writer.close()
    assert names(settings.directory) == ["step-00000002"], "and clears away what the other left"


def test_a_disk_that_hangs_holds_nothing_up(settings: WriterSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first write never comes back. The third state finds no free buffer, until the first one is given up."""
    monkeypatch.setenv("HEADWAY_FAULTS", "hang@checkpoint.shard")
    writer = CheckpointWriter(replace(settings, stalled_seconds=3.0))
    for step in (1, 2, 3):
        submit(writer, step)
    writer._saves._settings = settings  # its successor is well, and the machine may be busy
    writer.wait()
    outcomes = writer.outcomes()
    assert [(o.step, o.error is None) for o in outcomes] == [(1, False), (2, True), (3, True)]
    assert "the disk seems to hang (no progress for" in str(outcomes[0].error)
    writer.close()
    assert names(settings.directory) == ["step-00000002", "step-00000003"]


def test_the_end_does_not_wait_for_a_disk_that_hangs(settings: WriterSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_FAULTS", "hang@checkpoint.rename")
    writer = CheckpointWriter(replace(settings, stalled_seconds=2.0))
    submit(writer, 1)
    writer.close()
    assert ["seems to hang" in str(o.error) for o in writer.outcomes()] == [True]


@pytest.mark.slow
def test_a_write_that_takes_long_but_gets_on_is_waited_for(
    settings: WriterSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of a second for each of 80 files: twice as long as without a word is too long."""
    monkeypatch.setenv("HEADWAY_FAULTS", "slow@checkpoint.shard")
    writer = CheckpointWriter(replace(settings, stalled_seconds=4.0, max_shard_bytes=4))
    process = writer._saves.process
    begun = process.heard_seconds
    assert wait_until(lambda: process.heard_seconds > begun, LONG), "its start may take long where the machine is busy"
    writer.submit(1, blocks({f"t{n}": torch.ones(1) for n in range(80)}), {"step": 1}, {})
    writer.wait()
    assert [(o.error, o.seconds > 4.0) for o in writer.outcomes()] == [(None, True)]
    writer.close()


def test_a_process_that_was_killed_between_saves_is_replaced(writer: CheckpointWriter) -> None:
    submit(writer, 1)
    writer.wait()
    first = writer._saves.process
    os.kill(_process(writer), signal.SIGKILL)
    while not first.ended:
        time.sleep(0.001)
    submit(writer, 2)
    writer.wait()
    assert [o.error for o in writer.outcomes()] == [None, None]


def test_what_a_dead_process_had_not_begun_is_written_by_the_next(
    settings: WriterSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_FAULTS", "kill@checkpoint.shard")
    writer = CheckpointWriter(settings)
    os.kill(_process(writer), signal.SIGSTOP)
    submit(writer, 1)
    submit(writer, 2)
    os.kill(_process(writer), signal.SIGCONT)
    writer.close()
    assert [(o.step, o.error is None) for o in writer.outcomes()] == [(1, False), (2, True)]
    assert names(settings.directory) == ["step-00000002"]


def test_tensors_that_are_not_needed_any_more_make_room_for_their_copies(
    writer: CheckpointWriter, settings: WriterSettings
) -> None:
    state = make_state(1)
    state["optimizer.part"] = torch.arange(6.0)[:3]  # the rest may be somebody's
    expected = {name: tensor.clone() for name, tensor in state.items()}
    spent = {"optimizer.counts", "optimizer.part"}
    writer.submit(1, blocks(state), {"step": 1}, {"attempt": 1}, spent)
    kept = {name: tensor.untyped_storage().nbytes() for name, tensor in state.items()}
    assert kept.pop("optimizer.counts") == 0 and kept.pop("optimizer.part") == 24
    assert all(torch.equal(state[name], expected[name]) for name in kept)
    writer.wait()
    store = CheckpointStore(settings.directory)
    assert store.verify(1).good and equal(store.load(store.info(1)), expected)


@pytest.mark.parametrize("spent", [set(), {"optimizer.counts", "optimizer.step"}])
@pytest.mark.parametrize("dead", [0, 1])
def test_a_save_over_which_a_process_died_is_written_by_another_if_it_is_tried_again(
    settings: WriterSettings, dead: int, spent: set[str]
) -> None:
    """Two workers, as threads. The one's process would wait for the other's as long as its patience lasts."""
    barrier, said = threading.Barrier(2), [None, None]

    def gather(rank: int, what: Any) -> list[Any]:
        said[rank] = what
        barrier.wait()
        everyone = list(said)
        barrier.wait()
        return everyone

    def work(rank: int) -> tuple[bool, bool]:
        # Without end: the first worker's process has to learn of the other's death.
        mine = replace(settings, rank=rank, workers=2, patience_seconds=1e6)
        writer = CheckpointWriter(mine, partial(gather, rank))
        if rank == dead:
            os.kill(_process(writer), signal.SIGSTOP)
        state = blocks(make_state(1))
        writer.submit(1, state, {"step": 1}, {"attempt": 1}, spent)
        if rank == dead:
            os.kill(_process(writer), signal.SIGKILL)
        first = writer.wants_another_try()
        writer.submit(1, state, {"step": 1}, {"attempt": 1}, spent)
        second = writer.wants_another_try()
        writer.wait()
        writer.close()
        return first, second

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, (0, 1))) == [(True, False)] * 2
    store = CheckpointStore(settings.directory)
    assert store.verify(1).good and equal(store.load(store.info(1)), make_state(1))


def _process(writer: CheckpointWriter) -> int:
    return writer._saves.process.pid


def test_waiting_for_a_write_is_no_silence_as_long_as_it_gets_on(
    writer: CheckpointWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker alone has no exchange with others that would tell of it."""
    page, beats, turns = MagicMock(phase=Phase.END), [], 0
    submit(writer, 1)
    writer.wait()  # from here on the process says nothing of its own accord
    os.kill(_process(writer), signal.SIGSTOP)
    submit(writer, 2)

    def gather(said: Any) -> list[Any]:
        nonlocal turns
        turns += 1
        if turns == 2:
            writer._saves.process.heard_seconds += 1.0
        elif turns == 4:
            os.kill(_process(writer), signal.SIGCONT)
        return [said]

    page.beat.side_effect = lambda phase, step=None: beats.append((phase, turns))
    monkeypatch.setattr("headway.core.coordination.heartbeat._heartbeat", page)
    monkeypatch.setattr("headway.checkpoint.save.writer._LOOK_SECONDS", 0.01)
    monkeypatch.setattr(writer, "_gather", gather)
    writer.wait()
    assert beats[0] == (Phase.END, 2) and (Phase.END, 3) not in beats


def test_signals_that_stop_a_worker_do_not_stop_its_writing(writer: CheckpointWriter) -> None:
    submit(writer, 1)
    writer.wait()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(_process(writer), number)
    submit(writer, 2)
    writer.wait()
    assert [o.error for o in writer.outcomes()] == [None, None]


def test_the_process_ends_its_work_when_its_worker_is_gone(settings: WriterSettings, tmp_path: Path) -> None:
    """The worker is killed right after it has handed over a state."""
    pid = os.fork()
    if pid == 0:
        writer = CheckpointWriter(settings)
        submit(writer, 7)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    store = CheckpointStore(settings.directory)
    assert wait_until(store.list, LONG)
    assert [info.step for info in store.list()] == [7] and store.verify(7).good


def hold(writer: CheckpointWriter, step: int) -> None:
    writer.snapshot(step, blocks(make_state(step)), {"step": step}, {"attempt": 1})


def killed(settings: WriterSettings, act: Callable[[CheckpointWriter], None]) -> list[int]:
    """The steps that are there after a worker did something and was killed."""
    pid = os.fork()
    if pid == 0:
        act(CheckpointWriter(settings))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert settings.fence is not None
    assert wait_for_writers(settings.fence.run, 60)
    store = CheckpointStore(settings.directory)
    assert all(equal(store.load(info), make_state(info.step)) and store.verify(info.step).good for info in store.list())
    return [info.step for info in store.list()]


def owned(run: Path, attempt: int = 1) -> Fence:
    """Give a run to an attempt."""
    owner = Owner.this_process(attempt)
    (run / OWNER_FILE).write_text(json.dumps(asdict(owner)))
    return Fence(run, owner)


@pytest.fixture
def holding(settings: WriterSettings, tmp_path: Path) -> WriterSettings:
    return replace(settings, fence=owned(tmp_path), memory_snapshots=True)


def test_a_state_that_is_held_is_written_when_its_worker_dies(holding: WriterSettings) -> None:
    def act(writer: CheckpointWriter) -> None:
        for step in (1, 2, 3, 4):
            hold(writer, step)

    assert killed(holding, act) == [4], "the newest, and no other"


def test_a_state_half_copied_is_no_state(holding: WriterSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    def act(writer: CheckpointWriter) -> None:
        hold(writer, 1)
        hold(writer, 2)
        monkeypatch.setenv("HEADWAY_FAULTS", "kill@checkpoint.hold")
        hold(writer, 3)

    assert killed(holding, act) == [2]


def test_a_worker_killed_while_it_gives_an_order_loses_no_held_state(holding: WriterSettings) -> None:
    """Orders of large models are longer than a pipe takes at once."""

    def act(writer: CheckpointWriter) -> None:
        hold(writer, 1)
        assert writer._saves.process._popen.stdin is not None
        writer._saves.process._popen.stdin.write('{"kind": "write", "step": 2, "pieces": [{"name": "model.a"')
        writer._saves.process._popen.stdin.flush()

    assert killed(holding, act) == [1]


def test_what_the_process_logs_is_in_its_workers_log(tmp_path: Path) -> None:
    (tmp_path / "remote").mkdir()
    remote = {"url": f"file://{tmp_path}/remote"}
    config = Config(name="tiny", runs=tmp_path, train=TrainConfig(steps=1), checkpoint={"remote": remote})
    directory = tmp_path / "tiny" / "checkpoints"
    with console.log_to(tmp_path / "log"):
        writer = CheckpointWriter(WriterSettings(directory, after_save=MaintainerSettings.of(config, 1)))
        submit(writer, 1)
        writer.close()
    assert "step 1 is at file://" in (tmp_path / "log").read_text()


def test_nobody_goes_back_to_a_checkpoint_that_is_about_to_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or all that is newer is removed for it, and then it goes too."""
    monkeypatch.setenv("HEADWAY_FAULTS", "slow@checkpoint.prune")
    directory = tmp_path / "tiny" / "checkpoints"
    writer = CheckpointWriter(WriterSettings(directory, keep=1))
    for step in (5, 10, 20):
        submit(writer, step)
        writer.wait()
    world = World(0, 1, 0, torch.device("cpu"))
    assert CheckpointRewinder(CheckpointStore(directory), world).target(12, ()) is None
    assert names(directory) == ["step-00000020"]
    writer.close()


def test_what_is_saved_after_going_back_names_the_checkpoint_that_it_grew_out_of(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    manifest = save(store, 10)
    state = MagicMock(skipped_ranges=((12, 13),))
    state.prepare_to_load.return_value = blocks(make_state(0))
    job = MagicMock(state=state, checkpoint_context={"parent": None})
    CheckpointRewinder(store, World(0, 1, 0, torch.device("cpu"))).rewind(job, 10)
    origin = {"step": 10, "state_sha256": manifest.state_sha256}
    assert job.checkpoint_context == {"parent": origin, "left_out": [[12, 13]]}


def test_orders_stand_still_while_a_slot_is_looked_for(writer: CheckpointWriter) -> None:
    """The thread that hears of what is written takes them away; a dict that changes meanwhile would end training."""
    with ThreadPoolExecutor(1) as other:
        with writer._saves.changed:
            looking = other.submit(writer.get_ready, blocks(make_state(1)))
            assert not wait_until(looking.done, 0.2), "it looked while another thread had the lock"
        assert looking.result(LONG)


def test_what_is_older_than_a_checkpoint_is_not_written(holding: WriterSettings) -> None:
    def act(writer: CheckpointWriter) -> None:
        hold(writer, 1)
        submit(writer, 2)
        writer.wait()

    assert killed(holding, act) == [2]


def test_what_is_held_is_let_go_at_an_orderly_end(holding: WriterSettings) -> None:
    writer = CheckpointWriter(holding)
    hold(writer, 1)
    writer.close()
    assert not holding.directory.exists()
    writer = CheckpointWriter(holding)
    hold(writer, 2)
    writer.close(flush_snapshot=True)
    assert CheckpointStore(holding.directory).verify(2).good


def test_workers_that_die_write_the_newest_state_that_all_have(holding: WriterSettings) -> None:
    def act(writer: CheckpointWriter, rank: int) -> None:
        for step in (1, 2, 3):
            if rank == 1 and step == 3:
                writer.get_ready(shard(make_state(step), rank))  # it is killed before it has its copy
            else:
                writer.snapshot(step, shard(make_state(step), rank), {"step": step}, {"attempt": 1})
        writer.close(flush_snapshot=True)

    together(holding, act)
    store = CheckpointStore(holding.directory)
    assert [info.step for info in store.list()] == [2]
    assert equal(store.load(store.info(2)), make_state(2)) and store.verify(2).good


def test_a_run_is_not_taken_over_while_the_last_state_is_written(settings: WriterSettings, tmp_path: Path) -> None:
    """Not even while the process that is to write it has not begun."""
    assert wait_for_writers(tmp_path, 0), "nobody ever wrote"
    writer = CheckpointWriter(replace(settings, fence=owned(tmp_path)))
    assert not wait_for_writers(tmp_path, 0)
    os.kill(_process(writer), signal.SIGSTOP)
    submit(writer, 1)
    threading.Timer(0.2, os.kill, (_process(writer), signal.SIGCONT)).start()
    threading.Timer(0.3, writer.close).start()
    assert wait_for_writers(tmp_path, 60)
    assert CheckpointStore(settings.directory).verify(1).good


def test_nobody_waits_for_an_upload_as_for_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "remote").write_text("in the way, so it is tried again and again")
    remote = {"url": f"file://{tmp_path}/remote"}
    config = Config(name="tiny", runs=tmp_path, train=TrainConfig(steps=9), checkpoint={"remote": remote})
    run = tmp_path / "tiny"
    run.mkdir()
    settings = WriterSettings(run / "checkpoints", fence=owned(run), after_save=MaintainerSettings.of(config, 1))
    writer = CheckpointWriter(settings)
    submit(writer, 1)
    writer._saves.process.finish(tell_end=True)
    store = CheckpointStore(run / "checkpoints")
    assert wait_until(store.list, LONG), "its start may take long where the machine is busy"
    assert wait_for_writers(run, 15) and store.verify(1).good
    assert writer._saves.process._popen.poll() is None, "it goes on trying for a while"
    writer._saves.process.kill()
    writer.close()


def test_a_worker_that_waits_for_an_upload_says_so(settings: WriterSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take longer than any save, and the watchdog would call it a hang."""
    beats: list[Phase] = []

    def go_on_after_three(phase: Phase) -> None:
        beats.append(phase)
        if len(beats) == 3:
            os.kill(_process(writer), signal.SIGCONT)

    monkeypatch.setattr("headway.checkpoint.save.writer_client.continue_stopped", lambda pid: None)  # as one that sends
    monkeypatch.setattr("headway.checkpoint.save.writer.beat", go_on_after_three)
    monkeypatch.setattr("headway.checkpoint.save.writer._LOOK_SECONDS", 0.05)
    writer = CheckpointWriter(settings)
    submit(writer, 1)
    writer.wait()
    os.kill(_process(writer), signal.SIGSTOP)
    net = threading.Timer(60, os.kill, (_process(writer), signal.SIGCONT))  # or it is stopped for good without a word
    net.start()
    writer.close()
    net.cancel()
    assert beats.count(Phase.END) > 2


def test_a_stopped_process_with_nothing_to_do_is_not_waited_for(
    settings: WriterSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.checkpoint.save.writer._LOOK_SECONDS", 0.05)
    writer = CheckpointWriter(settings)
    submit(writer, 1)
    writer.wait()
    process = writer._saves.process
    os.kill(_process(writer), signal.SIGSTOP)
    net = threading.Timer(60, process.kill)  # or this test would never end
    net.start()
    writer.close()
    net.cancel()
    assert process._popen.wait() == 0


def test_a_part_that_grows_is_waited_for_though_the_worker_is_gone(
    settings: WriterSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_process, "_PATIENCE_ALONE_SECONDS", 0.1)
    settings.directory.mkdir()
    process = writer_process.WriterService(replace(settings, workers=3), io.StringIO())
    process._worker = -1  # somebody else is the parent now
    (settings.directory / "shard-00001.safetensors").write_bytes(b"begun")
    note = settings.directory / note_name(1)
    threading.Timer(0.5, write_json, (note, {"files": {}, "pieces": []})).start()
    assert process._part_of(settings.directory, 1).files == {}
    with pytest.raises(CheckpointError, match="worker 2 has not written its part in time"):
        process._part_of(settings.directory, 2)


def test_a_part_whose_process_is_gone_is_not_waited_for(
    settings: WriterSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it was begun; it is as long as the process lives, which may be in one long write."""
    monkeypatch.setattr(writer_process, "_PATIENCE_ALONE_SECONDS", 1e6)
    monkeypatch.setattr(writer_process, "_PATIENCE_BEGUN_SECONDS", 1e6)
    settings.directory.mkdir()
    mine = replace(settings, fence=owned(tmp_path), patience_seconds=1e6)
    process = writer_process.WriterService(replace(mine, workers=3), io.StringIO())
    process._worker = -1  # somebody else is the parent now
    (settings.directory / "shard-00001.safetensors").write_bytes(b"begun")
    lock, gone = open_writer_lock(tmp_path, 1), threading.Event()
    os.close(open_writer_lock(tmp_path, 2))
    assert not writer_has_ended(tmp_path, 1) and writer_has_ended(tmp_path, 2)
    threading.Timer(1.0, lambda: (gone.set(), os.close(lock))).start()
    for rank in (1, 2):
        with pytest.raises(CheckpointError, match=f"worker {rank} has not written its part, and its process is gone"):
            process._part_of(settings.directory, rank)
        assert gone.is_set(), "while its process was there, it was waited for"


def test_a_part_of_a_lost_machine_is_not_waited_for_once_it_no_longer_grows(
    settings: WriterSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_process, "_PATIENCE_ALONE_SECONDS", 0.1)
    monkeypatch.setattr(writer_process, "_PATIENCE_BEGUN_SECONDS", 1e6)
    settings.directory.mkdir()
    mine = replace(settings, fence=owned(tmp_path), patience_seconds=1e6)
    process = writer_process.WriterService(replace(mine, workers=2), io.StringIO())
    process._worker = -1  # somebody else is the parent now
    (settings.directory / "shard-00001.safetensors").write_bytes(b"begun")
    monkeypatch.setattr(writer_locks, "host_name", lambda: "elsewhere")
    lock = open_writer_lock(tmp_path, 1)
    monkeypatch.setattr(writer_locks, "host_name", lambda: "here")
    mark_lost(tmp_path, [1])
    with pytest.raises(CheckpointError, match="worker 1 has not written its part in time"):
        process._part_of(settings.directory, 1)
    os.close(lock)
    os.close(open_writer_lock(tmp_path, 1))
    assert not is_marked_lost(tmp_path, 1), "its successor has begun"


def test_of_a_process_on_another_machine_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock may not be seen here: that nobody seems to have it says nothing."""
    assert not writer_has_ended(tmp_path, 1), "it has not begun"
    monkeypatch.setattr(writer_locks, "host_name", lambda: "elsewhere")
    os.close(open_writer_lock(tmp_path, 1))
    assert writer_has_ended(tmp_path, 1)
    monkeypatch.undo()
    assert not writer_has_ended(tmp_path, 1)


def test_a_full_disk_is_no_reason_not_to_begin_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training would end for it: the process is one that takes a dead one's place."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    os.close(open_writer_lock(tmp_path, 1))
    assert not writer_has_ended(tmp_path, 1), "nothing is known of it"
    monkeypatch.undo()
    os.close(open_writer_lock(tmp_path, 1))
    assert writer_has_ended(tmp_path, 1)
    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(os, "ftruncate", full)
    os.close(open_writer_lock(tmp_path, 1))
    assert writer_has_ended(tmp_path, 1), "nothing was written again"


@pytest.mark.parametrize(("noted", "written"), [([3], [3]), (None, [])])
def test_notes_of_processes_that_are_gone_are_read_but_not_waited_for(
    noted: list[int] | None, written: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_waiting = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: pytest.fail("it waits"))
    monkeypatch.setattr(memory_snapshot, "time", without_waiting)
    if noted:
        (tmp_path / ".held-attempt-1-00001.json").write_text(json.dumps(noted))
    states, found = MemorySnapshots(tmp_path, 0, 2, has_ended=lambda rank: True), list[int]()
    states.add(SaveJob(1, 3, "attempt-1", 5, (), {}, {}))
    states.flush_snapshot(-1, lambda order: found.append(order.step))
    assert found == written


def test_writers_are_waited_for_on_nfs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flock(2): there it takes a file that is open for writing to have it for oneself."""
    flock = fcntl.flock

    def as_on_nfs(file: Any, operation: int) -> None:
        number = file if isinstance(file, int) else file.fileno()
        if operation & fcntl.LOCK_EX and fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(number, operation)

    monkeypatch.setattr(fcntl, "flock", as_on_nfs)
    lock = open_writer_lock(tmp_path, 0)
    assert not wait_for_writers(tmp_path, 0)
    os.close(lock)
    assert wait_for_writers(tmp_path, 0)


def test_who_lost_the_run_writes_nothing_and_stops(settings: WriterSettings, tmp_path: Path) -> None:
    writer = CheckpointWriter(replace(settings, fence=owned(tmp_path)))
    submit(writer, 1)
    writer.wait()
    assert len(writer.outcomes()) == 1
    owned(tmp_path, attempt=2)
    submit(writer, 2)
    writer.close()
    with pytest.raises(Fenced, match="attempt 1 no longer owns this run; its owner is now attempt 2"):
        writer.outcomes()
    assert names(settings.directory) == ["step-00000001"]


def together(
    settings: WriterSettings | Callable[[int], WriterSettings],
    act: Callable[[CheckpointWriter, int], Any],
    workers: int = 3,
) -> list[Any]:
    """Workers as threads, which say things to each other at a barrier."""
    barrier, said, results = threading.Barrier(workers), [None] * workers, [None] * workers

    def gather(rank: int) -> Callable[[Any], list[Any]]:
        def say(value: Any) -> list[Any]:
            said[rank] = json.loads(json.dumps(value))
            barrier.wait()
            everyone = list(said)
            barrier.wait()
            return everyone

        return say

    def work(rank: int) -> None:
        mine = settings(rank) if callable(settings) else settings
        writer = CheckpointWriter(replace(mine, rank=rank, workers=workers), gather(rank))
        try:
            results[rank] = act(writer, rank)
        finally:
            writer.close()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def shard(state: dict[str, torch.Tensor], rank: int, workers: int = 3) -> StateBlocks:
    """Rows of matrices are dealt out; the rest is everybody's."""
    found = blocks(state)
    for name, tensor in state.items():
        if tensor.ndim == 2 and len(tensor):
            rows = -(-len(tensor) // workers)
            part = tensor[rank * rows : (rank + 1) * rows]
            found[name] = Block(part, (min(rank * rows, len(tensor)), 0), tuple(tensor.shape))
    return found


def test_several_workers_write_one_checkpoint(settings: WriterSettings) -> None:
    def save_twice(writer: CheckpointWriter, rank: int) -> list[Any]:
        for step in (1, 2):
            writer.submit(step, shard(make_state(step), rank), {"step": step}, {"attempt": 1})
        writer.wait()
        return [outcome.error for outcome in writer.outcomes()]

    assert together(settings, save_twice) == [[None, None]] * 3
    store = CheckpointStore(settings.directory)
    for step in (1, 2):
        assert equal(store.load(store.info(step)), make_state(step)) and store.verify(step).good
    files = ["manifest.json", *(f"shard-{rank:05d}.safetensors" for rank in range(3))]
    assert names(store.info(2).path) == files
    whole = CheckpointStore(settings.directory.parent / "other").save(2, make_state(2), {"step": 2}, {})
    assert store.info(2).state_sha256 == whole.state_sha256, "the name of a state does not tell who saved it"


def relayed(settings: WriterSettings, tmp_path: Path) -> Callable[[int], WriterSettings]:
    """Three workers whose machines share nothing but a remote tier: two on the first, one on the second."""
    (tmp_path / "remote").mkdir()
    runs = [tmp_path / machine / "tiny" for machine in ("a", "b")]
    for run in runs:
        run.mkdir(parents=True)
    identity = RunIdentity(runs[0], "0" * 32, "tiny")
    remote = {"url": f"file://{tmp_path}/remote", "options": {}, "encrypt": False}
    claim = TierAccess(runs[0], remote, identity, 1).open().claim
    assert claim is not None

    def of(rank: int) -> WriterSettings:
        run = runs[rank // 2]
        relay = Relay(run, remote, claim, identity, first_rank=2)
        return replace(settings, directory=run / "checkpoints", relay=relay)

    return of


def test_workers_without_a_common_disk_write_one_checkpoint(settings: WriterSettings, tmp_path: Path) -> None:
    def save_twice(writer: CheckpointWriter, rank: int) -> list[Any]:
        for step in (1, 2):
            writer.submit(step, shard(make_state(step), rank), {"step": step}, {"attempt": 1})
        writer.wait()
        return [outcome.error for outcome in writer.outcomes()]

    of = relayed(settings, tmp_path)
    assert together(of, save_twice) == [[None, None]] * 3
    store = CheckpointStore(of(0).directory)
    for step in (1, 2):
        assert equal(store.load(store.info(step)), make_state(step)) and store.verify(step).good
    whole = CheckpointStore(tmp_path / "other").save(2, make_state(2), {"step": 2}, {})
    assert store.info(2).state_sha256 == whole.state_sha256
    assert names(of(2).directory) == [], "the other machine keeps nothing"
    relay = of(0).relay
    assert relay is not None
    tier, sent = relay.open(), []
    folder = tmp_path / "remote/tiny/run-001/step-00000002"
    (there,) = [path.name for path in folder.glob("*.safetensors")]
    before = (folder / there).stat().st_ino
    assert tier.publish(store.info(2).path, tmp_path / "journal", sent.append)
    assert sorted(path.name[17:] for path in folder.glob("*-*")) == [
        f"shard-{rank:05d}.safetensors" for rank in range(3)
    ]
    assert (folder / there).stat().st_ino == before, "what is there is not sent again"
    assert (folder / "manifest.json").exists() and len(list(folder.iterdir())) == 4, "notes are removed"


def test_a_failed_part_that_cannot_be_reported_leaves_the_process_alive(
    settings: WriterSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = replace(relayed(settings, tmp_path)(2), rank=2, workers=3)
    process, job = writer_process.WriterService(mine, io.StringIO()), SaveJob(1, 1, "t", 0, (), {}, {})
    assert process.handle(FailPart(job, "no such file: \udce4"))
    (note,) = (tmp_path / "remote").rglob("*-failed-00002.txt")
    assert note.read_text() == "no such file: \\udce4"

    def cannot_be_opened(_: Relay) -> None:
        raise ConfigError("the store cannot be used")

    monkeypatch.setattr(Relay, "open", cannot_be_opened)
    assert process.handle(FailPart(replace(job, number=2), "it died"))


def test_a_part_that_cannot_be_sent_fails_the_save_at_once(settings: WriterSettings, tmp_path: Path) -> None:
    def save(writer: CheckpointWriter, rank: int) -> str:
        writer.submit(1, shard(make_state(1), rank), {"step": 1}, {"attempt": 1})
        with suppress(CheckpointError):
            writer.wait()
        return str(writer.outcomes()[0].error)

    of = relayed(settings, tmp_path)
    of(2).directory.write_text("in the way")
    found = together(lambda rank: replace(of(rank), patience_seconds=1e6), save)
    assert "worker 2's part does not come: [Errno 20] Not a directory" in found[0] and "Not a directory" in found[2]
    assert names(of(0).directory) == []


def test_a_folder_that_cannot_be_made_holds_no_worker_up(settings: WriterSettings) -> None:
    """The others wait in it for their turn to write, and learn that the first one has given up."""
    settings.directory.write_text("in the way")

    def save_three(writer: CheckpointWriter, rank: int) -> list[int]:
        for step in (1, 2, 3):  # the third one needs a buffer again
            writer.submit(step, shard(make_state(step), rank, 2), {"step": step}, {"attempt": 1})
            with pytest.raises(CheckpointError):
                writer.wait()
        return [outcome.step for outcome in writer.outcomes() if outcome.error is not None]

    # And not when their patience is over, which it never is.
    assert together(replace(settings, patience_seconds=1e6), save_three, workers=2) == [[1, 2, 3]] * 2


@pytest.mark.parametrize("hanging", [0, 1])
def test_a_disk_that_hangs_for_one_of_several_workers_costs_one_checkpoint(
    settings: WriterSettings, hanging: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = OutstandingSaves._process_ended

    def once(self: OutstandingSaves, *how: Any, **more: Any) -> None:
        self._settings = replace(self._settings, stalled_seconds=450.0)  # the machine may be busy
        ended(self, *how, **more)

    monkeypatch.setattr(OutstandingSaves, "_process_ended", once)

    def save_three(writer: CheckpointWriter, rank: int) -> list[tuple[int, str]]:
        if rank == hanging:
            writer._saves._settings = replace(writer._saves._settings, stalled_seconds=3.0)
            os.kill(_process(writer), signal.SIGSTOP)
        for step in (1, 2, 3):  # the third finds no free buffer, until the first is given up
            writer.submit(step, shard(make_state(step), rank, 2), {"step": step}, {"attempt": 1})
        writer.wait()
        return [(outcome.step, str(outcome.error or "saved")) for outcome in writer.outcomes()]

    found = together(replace(settings, patience_seconds=120.0), save_three, workers=2)
    for outcomes in found:
        assert [(step, said == "saved") for step, said in outcomes] == [(1, False), (2, True), (3, True)]
    assert "the disk seems to hang (no progress for" in found[hanging][0][1]
    if hanging:
        assert "worker 1 has not written its part" in found[0][0][1] and "seems to hang" in found[0][0][1]
    store = CheckpointStore(settings.directory)
    assert names(settings.directory) == ["step-00000002", "step-00000003"]
    assert all(store.verify(step).good and equal(store.load(store.info(step)), make_state(step)) for step in (2, 3))


def test_the_failure_of_one_worker_is_known_to_the_first(
    settings: WriterSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(writer: CheckpointWriter, rank: int) -> str:
        if rank == 2:
            os.kill(_process(writer), signal.SIGSTOP)
        writer.submit(1, shard(make_state(1), rank), {"step": 1}, {"attempt": 1})
        if rank == 2:  # it dies with the order in its hands
            os.kill(_process(writer), signal.SIGKILL)
        try:
            writer.wait()
        except CheckpointError as error:
            return str(error.what)
        return "saved"

    first, _, last = together(replace(settings, patience_seconds=120.0), save)
    assert "died (signal 9)" in last
    assert "worker 2 has not written its part" in first and "died (signal 9)" in first
    assert names(settings.directory) == []
