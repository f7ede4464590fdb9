"""`headway.Trainer` as a PyTorch user calls it: any module, any dataset, in this process."""

from __future__ import annotations

import errno
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from headway import Callback, Config, Trainer
from headway.checkpoint.store import CheckpointStore
from headway.cli.application import application
from headway.config import ModelConfig
from headway.core.errors import ConfigError, DataError, Preempted
from headway.data.feeding import prefetch
from headway.models.build import build_model
from headway.run.session import attempt
from headway.telemetry.record import open_run
from headway.telemetry.report import render_report
from headway.telemetry.runs import list_runs, result_rows
from headway.telemetry.summary import summarize
from headway.training.own_task import count_samples
from support.waits import LONG


class Squares:
    def __init__(self, rows: int = 5) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"name": str(index), "x": torch.tensor([index / 5.0]), "y": torch.tensor([index**2 / 25.0])}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.head, self.unused = nn.Linear(1, 8), nn.Linear(8, 1), nn.Linear(2, 2)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.dropout(self.hidden(x).tanh()))
        return y


def loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Config]:
    def make(name: str = "run", **values: Any) -> Config:
        base = {
            "name": name,
            "runs": str(tmp_path),
            "train": {"steps": 6, "global_batch": 8, "device": "cpu"},
            "parallel": {"threads": 1},
            "checkpoint": {"every": "2 steps"},
            "telemetry": {"report": False},
        }
        return Config.model_validate({**base, **values})

    return make


class Break(Callback):
    def on_step(self, job: Any, step: int, metrics: dict[str, float]) -> None:
        metrics["mine/step"] = float(step)
        if step == 5:
            raise KeyError("a mistake in user code")


def state_hash(config: Config) -> str:
    return CheckpointStore(config.run_directory / "checkpoints").list()[-1].state_sha256


def test_a_broken_run_goes_on_exactly_with_a_dataset_smaller_than_a_batch(config: Callable[..., Config]) -> None:
    whole = Trainer(Model(), Squares(), loss, config("whole"), validation=Squares()).fit()
    assert whole.step == 6 and whole.validation_loss is not None
    with pytest.raises(KeyError, match="user code"):
        Trainer(Model(), Squares(), loss, config("broken"), callbacks=[Break()]).fit()
    resumed = Trainer(Model(), Squares(), loss, config("broken")).fit()
    assert resumed.step == 6
    assert state_hash(config("broken")) == state_hash(config("whole"))


def test_a_module_of_ones_own_is_told_as_what_it_is(
    config: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["own.py"])  # the report shows the command
    run = Trainer(Model(), Squares(), loss, config(evaluation={"every": 3}), validation=Squares()).fit()
    said = capsys.readouterr().err
    assert "samples/s" in said and "tok/s" not in said and "validation loss" in said and "perplexity" not in said
    assert run.metrics.last("evaluation/loss") is not None and run.metrics.last("evaluation/perplexity") is None
    page = re.sub("<[^>]+>", " ", render_report(open_run(run.directory)))
    about_run, _, settings = page.partition("Environment")
    assert "preset" not in settings and "tokenizer:" not in settings, "sections that it does not use"
    told = f"{about_run} {result_rows([summarize(open_run(run.directory))])}"
    assert "Samples per second" in told and "Epochs so far" in told and "8 samples" in told
    for word in ("oken", "erplexity", "reset", "MFU", "heads", "Sequence", "Started from"):
        assert word not in told, f"{word} is nothing that this run has"
    assert list_runs(tmp_path)[0].samples_per_second and list_runs(tmp_path)[0].tokens_per_second is None

    # A tokenizer of a store that happens to have the run's name is not its own.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/run/tokenizer").mkdir(parents=True)
    (tmp_path / "data/run/tokenizer/tokenizer.json").write_text("{}")
    for verb in ("export", "eval", "generate"):
        error = CliRunner().invoke(application([verb]), [verb, str(run.directory)]).exception
        assert isinstance(error, ConfigError) and "a module of your own" in error.what, verb
        assert "checkpoints/step-00000006/*.safetensors" in str(error.fix)


def test_activation_checkpointing_is_applied_or_refused(config: Callable[..., Config]) -> None:
    settings = config(train={"steps": 1, "global_batch": 8, "device": "cpu", "activation_checkpointing": "full"})
    with pytest.raises(ConfigError, match="cannot do it for Model") as caught:
        Trainer(Model(), Squares(), loss, settings).fit()
    assert "train.activation_checkpointing=none" in str(caught.value)
    shape = ModelConfig.model_validate({"dim": 8, "layers": 2, "heads": 2, "ffn_dim": 16, "vocab_size": 64})
    decoder = build_model(shape, vocab_size=64, seed=0)
    ids = torch.arange(8).repeat(4, 1)
    rows = [{"ids": ids[0], "targets": ids[0]}] * 4

    def decoder_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        value: torch.Tensor = model(batch["ids"], batch["targets"])
        return value

    Trainer(decoder, rows, decoder_loss, settings).fit()
    assert {layer.activation_checkpointing for layer in decoder.layers} == {"full"}


class Stuck(Squares):
    """Its rows stop coming after so many; then, when steps have used them up, a signal to stop comes."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.left, self.comes = 1 + rows, threading.Event()  # one is looked at before the run begins
        self.used_up = threading.Event()

    def _stop_soon(self) -> None:
        assert self.used_up.wait(LONG)
        time.sleep(0.3)
        signal.raise_signal(signal.SIGTERM)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not self.left:
            threading.Thread(target=self._stop_soon, daemon=True).start()
            self.comes.wait()
            raise KeyError("nobody wants it any more")
        self.left -= 1
        return super().__getitem__(index)


class Reaches(Callback):
    """Tells that a step is done."""

    def __init__(self, last: int, reached: threading.Event) -> None:
        self.last, self.reached = last, reached

    def on_start(self, job: Any) -> None:
        self.on_step(job, 0, {})

    def on_step(self, job: Any, step: int, metrics: dict[str, float]) -> None:
        if step == self.last:
            self.reached.set()


@pytest.mark.parametrize("steps", [0, 2, 3])
def test_a_signal_is_heard_while_data_do_not_come(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """The last step that was finished is saved, whether or not it was before."""
    monkeypatch.setattr(prefetch, "_CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(prefetch, "_LOOK_SECONDS", 0.02)
    data = Stuck(8 * steps)
    try:
        with pytest.raises(Preempted, match=f"step {steps} is saved" if steps else "SIGTERM before the first step"):
            callbacks = [Reaches(steps, data.used_up)]
            Trainer(Model(), data, loss, config("broken"), callbacks=callbacks).fit()
    finally:
        data.comes.set()
    found = [info.step for info in CheckpointStore(config("broken").run_directory / "checkpoints").list()]
    assert found == [step for step in (2, 3) if step <= steps]
    Trainer(Model(), Squares(), loss, config("broken")).fit()
    Trainer(Model(), Squares(), loss, config("whole")).fit()
    assert state_hash(config("whole")) == state_hash(config("broken"))


def test_an_encrypted_run_goes_on_exactly_and_with_its_key_only(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    checkpoint = {"every": "2 steps", "encrypt": True}
    with pytest.raises(ConfigError, match="checkpoints must be encrypted, but there is no key"):
        Trainer(Model(), Squares(), loss, config("broken", checkpoint=checkpoint)).fit()
    assert not CheckpointStore(config("broken").run_directory / "checkpoints").folders()
    monkeypatch.setenv("HEADWAY_ENCRYPTION_KEY", "ab" * 32)
    with pytest.raises(KeyError, match="user code"):
        Trainer(Model(), Squares(), loss, config("broken", checkpoint=checkpoint), callbacks=[Break()]).fit()
    monkeypatch.delenv("HEADWAY_ENCRYPTION_KEY")
    with pytest.raises(ConfigError, match="it is encrypted, and there is no key"):
        Trainer(Model(), Squares(), loss, config("broken")).fit()
    monkeypatch.setenv("HEADWAY_ENCRYPTION_KEY", "ab" * 32)
    Trainer(Model(), Squares(), loss, config("broken", checkpoint=checkpoint)).fit()
    Trainer(Model(), Squares(), loss, config("whole")).fit()
    assert state_hash(config("broken")) == state_hash(config("whole"))
    folders = CheckpointStore(config("broken").run_directory / "checkpoints").folders()
    assert [path.suffix for folder in folders for path in folder.glob("shard-*")] == [".sealed"] * 3


def test_metrics_that_a_callback_adds_are_recorded(config: Callable[..., Config]) -> None:
    with pytest.raises(KeyError):
        Trainer(Model(), Squares(), loss, config(), callbacks=[Break()]).fit()
    run = Trainer(Model(), Squares(), loss, config()).fit()
    assert run.metrics.series("mine/step")[1].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_it_works_in_a_thread_and_twice_in_a_process(config: Callable[..., Config]) -> None:
    steps = []

    def fit() -> None:
        steps.append(Trainer(Model(), Squares(), loss, config(f"run{len(steps)}")).fit().step)

    fit()
    thread = threading.Thread(target=fit)
    thread.start()
    thread.join(timeout=LONG)
    assert steps == [6, 6]
    assert state_hash(config("run0")) == state_hash(config("run1"))


class Ending(Squares):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if threading.current_thread() is not threading.main_thread() and index == 3:
            raise StopIteration
        return super().__getitem__(index)


def test_a_dataset_that_stops_is_no_finished_run(config: Callable[..., Config]) -> None:
    with pytest.raises(RuntimeError, match="ended before the last step"):
        Trainer(Model(), Ending(), loss, config()).fit()


class Noisy(Squares):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "y": torch.tensor([random.random()])}


def test_a_dataset_that_draws_from_shared_generators_is_refused(config: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match="draws random numbers"):
        Trainer(Model(), Noisy(), loss, config()).fit()
    assert Trainer(Model(), Noisy(), loss, config(determinism="off")).fit().step == 6


def test_a_dataset_of_another_size_is_refused(config: Callable[..., Config]) -> None:
    with pytest.raises(KeyError):
        Trainer(Model(), Squares(), loss, config(), callbacks=[Break()]).fit()
    with pytest.raises(DataError, match="the data has changed"):
        Trainer(Model(), Squares(4), loss, config()).fit()
    with pytest.raises(DataError, match="fewer rows"):
        Trainer(Model(), Squares(4), loss, config()).fit(accept_changes=True)


class Parts(Squares):
    """A dataset whose parts know the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.half = Squares(3)
        self.half.whole = self  # type: ignore[attr-defined]


def test_datasets_may_refer_to_each_other(config: Callable[..., Config]) -> None:
    assert Trainer(Model(), Parts(), loss, config()).fit().step == 6


class Seen(Callback):
    """Which samples steps have used."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def on_step(self, job: Any, step: int, metrics: Any) -> None:
        self.rows += [int(row) for picks in job.task.feed.picks(step - 1, 0) for row in picks.rows]


def test_a_dataset_that_has_grown_joins(config: Callable[..., Config]) -> None:
    first, then = Seen(), Seen()
    train = {"steps": 6, "global_batch": 4, "device": "cpu"}
    Trainer(Model(), Squares(30), loss, config(train=train), callbacks=[first]).fit()
    longer = config(train={**train, "steps": 12})
    Trainer(Model(), Squares(40), loss, longer, callbacks=[then]).fit(accept_changes=True)
    assert sorted([*first.rows, *then.rows[:16]]) == list(range(40))  # and then all begin again


def test_samples_are_counted_in_batches_of_any_form() -> None:
    x = torch.zeros(3, 2)
    for batch in (x, [x], (x, 1), {"name": ["a", "b", "c"], "scale": torch.tensor(1.0), "x": x}, {"in": {"x": x}}):
        assert count_samples(batch) == 3
    with pytest.raises(ConfigError, match="no tensor"):
        count_samples({"name": ["a", "b"]})


def test_a_restart_is_granted_once(
    config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyError):
        Trainer(Model(), Squares(), loss, config(), callbacks=[Break()]).fit()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # torchrun --max-restarts starts the same command again
    assert Trainer(Model(), Squares(), loss, config()).fit(restart=True).step == 6
    assert not list(tmp_path.glob("run.old-*"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    Trainer(Model(), Squares(), loss, config()).fit(restart=True)
    assert [path.name for path in tmp_path.glob("run.old-*")] == ["run.old-001"]
    # A machine has come: torchrun starts its workers again, and counts no restart. It began before the attempt.
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    assert Trainer(Model(), Squares(), loss, config()).fit(restart=True).step == 6
    assert [path.name for path in tmp_path.glob("run.old-*")] == ["run.old-001"]
    monkeypatch.setattr(attempt, "_agent_start", time.time)  # another torchrun
    Trainer(Model(), Squares(), loss, config()).fit(restart=True)
    assert len(list(tmp_path.glob("run.old-*"))) == 2


def test_a_signal_before_the_loop_is_a_preemption(config: Callable[..., Config]) -> None:
    class Stopped(Squares):
        def __getitem__(self, index: int) -> dict[str, Any]:
            signal.raise_signal(signal.SIGTERM)  # one sample is looked at before the run begins
            return super().__getitem__(index)

    with pytest.raises(Preempted, match="SIGTERM"):
        Trainer(Model(), Stopped(), loss, config()).fit()


@pytest.mark.parametrize("how", ["folder", "disk"])
def test_a_report_that_cannot_be_written_takes_nothing_from_a_run(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], how: str
) -> None:
    wanted = config(telemetry={"report": True})
    if how == "folder":
        (wanted.run_directory / "report.html").mkdir(parents=True)
        (wanted.run_directory / "report.html" / "mine").touch()
        (wanted.run_directory / "attempts").mkdir()  # so it is a run
    else:
        full = OSError(errno.ENOSPC, "No space left on device")
        monkeypatch.setattr("headway.telemetry.report.write_report", Mock(side_effect=full))
    assert Trainer(Model(), Squares(), loss, wanted).fit().step == 6
    assert "warning: no report.html: " in capfd.readouterr().err
