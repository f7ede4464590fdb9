"""What the loop tells its supervisor and the metrics beside its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from headway.api import train
from headway.checkpoint.save.fence import Fenced, OwnerUnknown
from headway.checkpoint.save.outstanding_saves import OutstandingSaves
from headway.checkpoint.save.writer import CheckpointWriter
from headway.checkpoint.store import CheckpointStore
from headway.config import load_config
from headway.core.coordination import heartbeat
from headway.core.coordination.heartbeat import Heartbeat, Phase
from headway.core.errors import (
    CheckpointError,
    ConfigError,
    CorruptionError,
    DataError,
    DivergedError,
    Preempted,
)
from headway.run.session import session
from headway.telemetry.metrics import MetricsLog, read_metrics
from headway.training import loop, saves
from headway.training.evaluation.in_loop import was_evaluated
from headway.training.step import TrainStep
from support.states import make_state, save


def test_a_state_that_is_held_counts_as_a_checkpoint(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the supervisor, since a hold may have to wait for an earlier write, and in the metrics."""
    page = Heartbeat(tmp_path / "heartbeat")
    monkeypatch.setattr(heartbeat, "_heartbeat", page)
    phases: list[Phase] = []

    def watched(method: str) -> None:
        original = getattr(CheckpointWriter, method)

        def call(self: CheckpointWriter, *arguments: Any, **options: Any) -> Any:
            phases.append(page._phase)
            return original(self, *arguments, **options)

        monkeypatch.setattr(CheckpointWriter, method, call)

    watched("snapshot")
    watched("get_ready")
    overrides = [
        "supervise.enabled=false",
        "train.steps=4",
        "checkpoint.every=100 steps",
        "checkpoint.memory_every=2 steps",
    ]
    run = train(load_config(tiny(), overrides))
    # Step 1 makes room; step 2 is held, 4 saved; each copy makes sure of its room.
    assert phases == [Phase.CHECKPOINT] * 4
    steps, seconds = run.metrics.series("checkpoint/hold_stall_seconds")
    assert steps.tolist() == [2] and seconds[0] > 0


@pytest.mark.parametrize(
    ("every", "held", "made"),
    [
        ("100 steps", None, False),
        ("4 steps", None, False),  # the last one, when no step comes any more
        ("4 steps", "3 steps", True),
        ("3 steps", None, True),
        ("10 min", None, True),
        ("auto", None, True),
    ],
)
def test_room_for_a_copy_is_made_early_where_one_may_be_wanted_on_the_way(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, every: str, held: str | None, made: bool
) -> None:
    """It is as large as the state; the last copy takes the place of what steps have needed."""
    calls: list[str] = []

    def watched(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    watched(CheckpointWriter, "get_ready")
    watched(CheckpointWriter, "submit")
    watched(saves, "give_back_freed_memory")
    settings = {"every": every, "memory_every": held}
    train(load_config(tiny(train={"steps": 4}, checkpoint=settings), ["supervise.enabled=false"]))
    assert (calls[0] == "get_ready") == made
    assert calls[-3:] == ["give_back_freed_memory", "submit", "get_ready"]


@pytest.mark.parametrize("own_process", [False, True])
def test_the_last_copy_has_the_place_of_gradients_and_of_moments_that_nobody_needs(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, own_process: bool
) -> None:
    seen: list[tuple[int, set[str], bool]] = []
    submit, jobs = CheckpointWriter.submit, list[loop.Job]()

    def told(self: CheckpointWriter, step: int, blocks: Any, cursor: Any, context: Any, spent: set[str]) -> float:
        has_gradients = any(p.grad is not None for p in jobs[0].state.model.parameters())
        seen.append((step, {name.partition(".")[0] for name in spent}, has_gradients))
        return submit(self, step, blocks, cursor, context, spent)

    def in_its_own(job: loop.Job, *watchers: Any) -> None:
        jobs.append(replace(job, own_process=own_process))
        loop.train_loop(jobs[0], *watchers)

    monkeypatch.setattr(CheckpointWriter, "submit", told)
    monkeypatch.setattr(session, "train_loop", in_its_own)
    config = load_config(tiny(train={"steps": 4}, checkpoint={"every": "2 steps"}), ["supervise.enabled=false"])
    train(config)
    assert seen == [(2, set(), True), (4, {"optimizer"} if own_process else set(), False)]
    store = CheckpointStore(config.run_directory / "checkpoints")
    assert store.verify(4).good
    moments = [t for name, t in store.load(store.info(4)).items() if name.startswith("optimizer.") and t.ndim]
    assert moments and all(bool(t.any()) for t in moments)


def test_a_state_that_is_handed_over_has_the_records_of_all_its_steps(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill right after that loses none which the next attempt does not make again."""
    config = load_config(
        tiny(),
        [
            "supervise.enabled=false",
            "train.steps=4",
            "checkpoint.every=3 steps",
            "checkpoint.memory_every=2 steps",
        ],
    )
    written, write_all = list[tuple[int, int | None]](), MetricsLog._write_all

    def slowly(self: MetricsLog) -> None:
        time.sleep(0.2)
        write_all(self)

    def watched(method: str) -> None:
        original = getattr(CheckpointWriter, method)

        def call(self: CheckpointWriter, step: int, *arguments: Any) -> Any:
            written.append((step, read_metrics(config.run_directory).last_step))
            return original(self, step, *arguments)

        monkeypatch.setattr(CheckpointWriter, method, call)

    monkeypatch.setattr(MetricsLog, "_write_all", slowly)
    watched("snapshot")
    watched("submit")
    train(config)
    assert written == [(2, 2), (3, 3), (4, 4)]


def test_what_came_of_uploads_is_in_the_metrics(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed one costs nothing but itself; the last one is known before the run ends."""
    found = {}
    (tmp_path / "remote").mkdir()
    for name, faults in (("sent", ""), ("failed", "enospc@upload.file")):
        monkeypatch.setenv("HEADWAY_FAULTS", faults)
        config = tiny(checkpoint={"remote": {"url": f"file://{tmp_path}/remote"}, "every": "3 steps"})
        metrics = train(load_config(config, [f"name={name}", "supervise.enabled=false", "train.steps=3"])).metrics
        keys = ("checkpoint/uploaded_step", "checkpoint/upload_failed_step")
        found[name] = [metrics.series(key)[1].tolist() for key in keys]
        assert len(metrics.series("checkpoint/upload_seconds")[1]) == (name == "sent")
    assert found == {"sent": [[3.0], []], "failed": [[], [3.0]]}


def test_training_goes_on_when_the_disk_hangs(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADWAY_FAULTS", "hang@checkpoint.shard")
    ended = OutstandingSaves._process_ended

    def once(self: OutstandingSaves, *how: Any, **more: Any) -> None:
        self._settings = replace(self._settings, stalled_seconds=600.0)  # the machine of this test may be busy
        ended(self, *how, **more)

    monkeypatch.setattr(OutstandingSaves, "_process_ended", once)
    allowed = ["supervise.hang_seconds=3", "supervise.save_seconds=6", "supervise.enabled=false"]
    run = train(load_config(tiny(), [*allowed, "train.steps=4"]))
    assert run.metrics.series("checkpoint/failed_step")[1].tolist() == [2.0]
    assert run.metrics.series("checkpoint/saved_step")[1].tolist() == [4.0]
    assert "training continues without a checkpoint of step 2: the disk seems to hang" in capsys.readouterr().err


def test_an_evaluation_counts_as_done_by_the_history_or_by_the_checkpoint(tmp_path: Path) -> None:
    def record(attempt: int, step: int, name: str) -> None:
        with MetricsLog(tmp_path / "metrics.jsonl", attempt) as log:
            log.write(step, {name: 1.0})

    assert not was_evaluated(tmp_path, 4)
    record(1, 4, "train/loss")
    assert not was_evaluated(tmp_path, 4)
    record(1, 4, "evaluation/loss")
    assert was_evaluated(tmp_path, 4) and not was_evaluated(tmp_path, 5)
    record(2, 4, "train/loss")
    assert not was_evaluated(tmp_path, 4), "of a step 4 that was done again"
    store = CheckpointStore(tmp_path / "checkpoints")
    save(store, 4)
    assert not was_evaluated(tmp_path, 4)
    store.save(6, make_state(), {"step": 6}, {"metrics": {"evaluation/loss": 1.0}})
    assert was_evaluated(tmp_path, 6), "made elsewhere, where the history is"


def job_of(world: Any) -> Any:
    """As much of a job as is asked for before the first step."""
    return SimpleNamespace(
        config=None,
        state=SimpleNamespace(cursor=SimpleNamespace(step=0)),
        world=world,
        assembled=SimpleNamespace(lanes=[0]),
        task=SimpleNamespace(feed=None),
        own_process=False,
        total_steps=1,
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_one_of_several_workers_does_not_leave_the_others_in_a_step(
    monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """They may have their data, and wait for it there."""
    asked: list[bool] = []

    def prefetcher(*_: Any, stopped: Callable[[], bool]) -> Any:
        asked.append(stopped())
        raise KeyError

    monkeypatch.setattr(loop, "Prefetcher", prefetcher)
    monkeypatch.setattr(loop.StopSignals, "stop", True)
    world = SimpleNamespace(size=workers, data_rank=0, mesh=SimpleNamespace(data=workers))
    with pytest.raises(KeyError):
        loop.train_loop(job_of(world))
    assert asked == [workers == 1]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_peak_of_a_gpu_is_of_training_only(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Trial steps came before; what happens in the loop, its first callback included, comes after."""
    events: list[Any] = []

    class Feed(nullcontext[Any]):
        def __init__(self, *_: Any, **more: Any) -> None:
            super().__init__()
            events.append("feed")

    @contextmanager
    def observed(*_: Any) -> Iterator[None]:
        events.append("loop")
        raise KeyError
        yield

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", events.append)
    monkeypatch.setattr(loop, "Prefetcher", Feed)
    monkeypatch.setattr(loop, "StepMetrics", lambda job, feed: None)
    monkeypatch.setattr(loop, "Saves", lambda *_: None)
    monkeypatch.setattr(loop, "_run_callbacks", observed)
    world = SimpleNamespace(size=1, data_rank=0, mesh=SimpleNamespace(data=1), device=torch.device(device))
    with pytest.raises(KeyError):
        loop.train_loop(job_of(world))
    assert events == ["feed", *([world.device] if device == "cuda" else []), "loop"]


@pytest.mark.parametrize(
    ("end", "memory_every", "written"),
    [
        (None, "2 steps", False),
        (DataError, "2 steps", True),
        (CheckpointError, "2 steps", True),
        (OwnerUnknown, "2 steps", True),
        (ValueError, "2 steps", True),
        (Preempted, "2 steps", False),
        (DivergedError, "2 steps", False),
        (CorruptionError, "2 steps", False),
        (Fenced, "2 steps", False),
        (DataError, None, False),
    ],
)
def test_what_is_held_is_written_at_any_end_that_leaves_it_worth_it(
    end: type[Exception] | None, memory_every: str | None, written: bool
) -> None:
    writer = MagicMock()
    config = SimpleNamespace(checkpoint=SimpleNamespace(memory_every=memory_every))
    writer.lost_upload.return_value = None
    job: Any = SimpleNamespace(config=config, callbacks=(), writer=writer)
    with pytest.raises(end) if end else nullcontext(), loop._run_callbacks(job, lambda: False):
        if end is not None:
            raise end("why")
    assert writer.close.call_args.kwargs["flush_snapshot"] is written


def test_data_that_cannot_be_read_cost_no_state_that_is_held(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = TrainStep.run

    def fail(step: TrainStep, *given: Any) -> Any:
        if step.assembled.state.cursor.step == 3:
            raise DataError("a shard cannot be read")
        return original(step, *given)

    monkeypatch.setattr(TrainStep, "run", fail)
    every = ["checkpoint.every=100 steps", "checkpoint.memory_every=2 steps"]
    with pytest.raises(DataError, match="a shard cannot be read"):
        train(load_config(tiny(), ["supervise.enabled=false", *every, "train.steps=4"]))
    (run,) = (tmp_path / "runs").iterdir()
    assert CheckpointStore(run / "checkpoints").verify(2).good


@pytest.mark.parametrize("step", [0, 1])
def test_memory_that_runs_out_in_the_first_step_is_told_with_what_takes_less(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Trial steps know nothing of the update; in a later step it may be passing, so that is a crash like any other."""
    original = TrainStep.run

    def run_out(train_step: TrainStep, *given: Any) -> Any:
        if train_step.assembled.state.cursor.step == step:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return original(train_step, *given)

    monkeypatch.setattr(TrainStep, "run", run_out)
    config = load_config(tiny(), ["supervise.enabled=false", "train.steps=3"])
    with pytest.raises(ConfigError if step == 0 else torch.OutOfMemoryError, match="out of memory") as caught:
        train(config)
    if isinstance(caught.value, ConfigError):
        assert "train.activation_checkpointing=full" in (caught.value.fix or "")
