"""How an attempt begins and ends."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.api import train, training
from headway.checkpoint.store import CheckpointStore
from headway.config import Config, MeshShape, TrainConfig, identity, load_config, load_resolved, override, resolve
from headway.core.errors import ConfigError, DataError, Preempted
from headway.core.files.hashes import fingerprint
from headway.core.process.signals import handled
from headway.data.in_use import check_not_in_use
from headway.parallel.world import World
from headway.run.session import attempt as attempts
from headway.run.session.assemble import _updates
from headway.run.session.attempt import RunOptions, attempt_scope, preemptible
from headway.run.session.spending import meter_of
from headway.run.session.start import _check_same_run
from headway.run.supervisor import supervisor
from headway.telemetry.record import open_run
from headway.training.stop import StopSignals
from support.states import save


def test_a_signal_while_an_attempt_begins_is_its_end(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes after the attempt is on disk, and before the block that would record its end."""

    def interrupted(**facts: Any) -> dict[str, Any]:
        signal.raise_signal(signal.SIGTERM)
        return {}

    monkeypatch.setattr(attempts, "provenance", interrupted)
    config = load_config(tiny())
    with pytest.raises(Preempted, match="SIGTERM"), preemptible(), attempt_scope(config, {}, {}, RunOptions()):
        pytest.fail("the attempt goes on")
    record = json.loads((config.run_directory / "attempts/001/attempt.json").read_text())
    assert (record["outcome"], record["exit_code"]) == ("preempted", 75)
    assert json.loads((config.run_directory / "run.json").read_text()).keys() == {"id"}


def test_a_number_of_workers_that_an_agent_overrules_is_told(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    elastic = ["parallel.workers=2", "parallel.min_workers=1", "determinism=elastic", "train.lanes=2"]
    for number, (overrides, told) in enumerate(
        ((["parallel.workers=1"], False), (elastic[:1], True), (elastic, False))
    ):
        train(load_config(tiny(train={"steps": 2}), [*overrides, f"name=of{number}"]))
        said = "parallel.workers=2 is ignored: the agent has started 1 worker\n"
        assert (said in capfd.readouterr().err) == told


@pytest.mark.parametrize("supervised", [True, False])
def test_a_runs_store_stays_in_its_place_between_attempts_too(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, supervised: bool
) -> None:
    config = load_config(tiny(), [f"supervise.enabled={str(supervised).lower()}"])

    def look(*_: Any, **__: Any) -> None:
        with pytest.raises(DataError, match="a training reads this token store"):
            check_not_in_use(config.data.store)
        raise Preempted("seen")

    monkeypatch.setattr(*((supervisor, "supervise") if supervised else (training, "_train")), look)
    with pytest.raises(Preempted, match="seen"):
        train(config, own_process=True)
    check_not_in_use(config.data.store)


def test_ctrl_c_is_no_crash(tiny: Callable[..., Path]) -> None:
    config = load_config(tiny())
    with pytest.raises(KeyboardInterrupt), attempt_scope(config, {}, {}, RunOptions()) as attempt:
        raise KeyboardInterrupt
    record = json.loads((attempt.directory / "attempt.json").read_text())
    assert (record["outcome"], record["exit_code"]) == ("interrupted", 130)
    assert not (attempt.directory / "traceback.txt").exists()


def test_a_finished_run_gets_no_further_attempt(tiny: Callable[..., Path], capfd: pytest.CaptureFixture[str]) -> None:
    config = load_config(tiny(train={"steps": 4}))
    train(config)
    for again in (config, load_config(tiny(train={"steps": 4}), ["parallel.workers=2"])):  # workers are not started
        capfd.readouterr()
        assert train(again).step == 4
        assert "is finished: all 4 steps are done" in capfd.readouterr().err
    run = open_run(config.run_directory)
    assert [attempt.number for attempt in run.attempts] == [1]
    # What looks finished and is not is no reason to do nothing.
    shard = next((config.run_directory / "checkpoints" / "step-00000004").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    train(config)
    assert len(open_run(config.run_directory).attempts) == 2
    with pytest.raises(ConfigError, match=r"train\.steps was 4"):
        train(load_config(tiny(train={"steps": 6})))


def test_a_config_is_replaced_as_long_as_no_step_was_done(tiny: Callable[..., Path]) -> None:
    wrong, right = load_config(tiny(seed=4)), load_config(tiny(seed=5))
    with pytest.raises(ConfigError, match="too small"), attempt_scope(wrong, {}, {}, RunOptions()):
        raise ConfigError("too small")
    with attempt_scope(right, {}, {}, RunOptions()):
        pass
    assert load_resolved(right.run_directory / "config.yaml").seed == 5
    (right.run_directory / "metrics.jsonl").write_text('{"step": 1, "attempt": 2, "train/loss": 1.0}\n')
    with pytest.raises(ConfigError, match="seed was 5 and is now 4"), attempt_scope(wrong, {}, {}, RunOptions()):
        pass


@pytest.mark.parametrize(
    ("strategy", "shards", "theirs"),
    [("zero3", 1, False), ("zero3", 2, True), ("zero1", 2, False), ("deepspeed_zero2", 1, True)],
)
def test_where_updates_are_computed_with_moments_in_host_memory(strategy: str, shards: int, theirs: bool) -> None:
    """Alone there is no `fully_shard` that would keep them there, whatever the strategy's name."""
    gpu = torch.device("cuda", 0)
    config = Config.model_validate({"optimizer": {"offload": True}, "parallel": {"strategy": strategy}})
    world = World(0, shards, 0, gpu, MeshShape(dp_shard=shards))
    settings, updates_on = _updates(config.optimizer, strategy, world)
    assert (settings.offload, updates_on) == ((False, torch.device("cpu")) if theirs else (True, gpu))
    assert _updates(Config().optimizer, strategy, world)[1] == gpu


def test_a_remote_checkpoint_of_another_config_is_not_gone_on_from(tmp_path: Path) -> None:
    config = override(resolve(Config(train=TrainConfig(steps=1))), ["seed=3"])
    ours = fingerprint(identity(config))
    manifest = save(CheckpointStore(tmp_path), 1)
    with pytest.raises(ConfigError, match="made with another config"):
        _check_same_run(config, manifest, "s3://x")
    _check_same_run(config, manifest.model_copy(update={"context": {"identity": ours}}), "s3://x")


def test_a_restarted_run_is_marked_as_one_for_the_remote_tier(tmp_path: Path) -> None:
    overrides = [f"runs={tmp_path}", f"checkpoint.remote.url=file://{tmp_path}/remote"]
    config = override(resolve(Config(train=TrainConfig(steps=1))), overrides)
    for restart in (False, True):
        with attempt_scope(config, {}, {}, RunOptions(restart=restart)):
            assert (config.run_directory / ".restarted").exists() is restart


def test_an_attempt_begins_when_nobody_writes_for_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, waited = override(resolve(Config(train=TrainConfig(steps=1))), [f"runs={tmp_path}"]), []
    monkeypatch.setattr(attempts, "wait_for_orphaned_writers", lambda run: waited.append((run, list(run.glob("*")))))
    for restart in (False, True):  # what is moved aside gets no checkpoint any more
        with attempt_scope(config, {}, {}, RunOptions(restart=restart)):
            assert waited == [(config.run_directory, [])]


def test_each_attempt_costs_what_its_machines_did(tiny: Callable[..., Path]) -> None:
    """A run that goes on where an hour costs another price; the start of an attempt is paid for too."""
    config = load_config(tiny(), ["telemetry.usd_per_hour=2"])
    with attempt_scope(config, {}, {}, RunOptions()) as first:
        pass
    record = json.loads((first.directory / "attempt.json").read_bytes())
    (first.directory / "attempt.json").write_text(json.dumps({**record, "seconds": 3600.0}))
    with attempt_scope(override(config, ["telemetry.usd_per_hour=10"]), {}, {}, RunOptions()) as second:
        assert second._lock is not None
        second._lock.write(second.owner, time.monotonic() - 1800)
        meter = meter_of(config, config.run_directory, second.number)
        assert meter is not None and meter.now().total_usd == pytest.approx(2.0 + 5.0, abs=0.1)


class _Ignores:
    """Errors in it are printed, and then nobody knows of them."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGUSR1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_whose_error_was_ignored_stops_the_run_at_its_first_step() -> None:
    with preemptible():
        for _ in range(2):
            thing = _Ignores()
            del thing
        with StopSignals() as signals:
            assert signals.stop and signals.name == "SIGUSR1"
        with StopSignals() as signals:
            assert not signals.stop, "told once"


def test_a_signal_to_stop_is_not_taken_for_a_compilers_error() -> None:
    """Compilers, and who tries whether one works, take any `Exception` that comes for their own."""
    with pytest.raises(Preempted, match="SIGTERM"), preemptible(), suppress(Exception):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(("error", "heard"), [(Preempted("saved"), 0), (KeyError("a mistake"), 2), (None, 2)])
def test_a_signal_over_the_record_of_the_end_waits(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, error: Exception | None, heard: int
) -> None:
    """Under torchrun it would kill the process: whichever worker leaves first has the agent send it to the others."""
    came: list[int] = []
    finish = attempts.Attempt.finish

    def told_meanwhile() -> None:
        signal.raise_signal(signal.SIGTERM)
        assert not came, "the machine may be gone before all is written down and answered"

    def finish_slowly(self: Any, *arguments: Any, **facts: Any) -> None:
        told_meanwhile()
        finish(self, *arguments, **facts)

    @contextmanager
    def answer_slowly(*_: object) -> Iterator[None]:
        try:
            yield
        finally:
            told_meanwhile()

    monkeypatch.setattr(attempts.Attempt, "finish", finish_slowly)
    monkeypatch.setattr(attempts, "watching_for", answer_slowly)
    config = load_config(tiny())
    with (
        handled((signal.SIGTERM,), lambda number, frame: came.append(number)),
        suppress(Preempted, KeyError),
        attempt_scope(config, {}, {}, RunOptions()),
    ):
        if error is not None:
            raise error
    record = json.loads((config.run_directory / "attempts/001/attempt.json").read_text())
    assert record["exit_code"] == (0 if error is None else getattr(error, "exit_code", 1))
    assert len(came) == heard, "who is preempted was asked for no more than that"
