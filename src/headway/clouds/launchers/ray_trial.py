"""Ray Tune searches, and each of its trials is a run in the trial's storage, with a process of its own.

    tuner = tune.Tuner(
        headway.ray.trainable(config),
        param_space={"optimizer.learning_rate": tune.loguniform(1e-4, 1e-2)},
        tune_config=tune.TuneConfig(metric="evaluation/loss", mode="min", scheduler=ASHAScheduler()),
    )

Ray decides, and the run keeps what counts: a trial that Ray stops, pauses or loses is saved, and continues from its own
run directory. A checkpoint of Ray holds what another run needs to begin from this one (`run.directory.beginning`).
"""

from __future__ import annotations

import json
import subprocess
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.checkpoint.run_identity import read_run_id
from headway.clouds.launchers.job import Job, with_sources
from headway.clouds.launchers.ray_run import (
    POINTER,
    end_process,
    newest_checkpoint,
    numbers_in,
    own_variables,
    wait_for_owner,
)
from headway.config import Config, dump_config, load_config, resolve
from headway.config.loading.document import parse
from headway.core.coordination.preemption_board import Notice, post
from headway.core.coordination.train_command import place
from headway.core.errors import CheckpointError, ConfigError, HeadwayError, Preempted, error_with, needing
from headway.core.files.atomic import write_json, write_text
from headway.core.files.foreign import read_end, read_json_object
from headway.core.process.command import module_command, tied_command
from headway.core.process.waiting import wait_until
from headway.core.user_command import suggest
from headway.run.directory.beginning import copy_for_beginning
from headway.run.directory.ledger import Ledger
from headway.run.directory.run_directory import RunDirectory, newest_attempt
from headway.run.session.attempt import RunOptions, has_data
from headway.run.session.begin_from import begin_from
from headway.telemetry.tail import JsonLinesTail

if TYPE_CHECKING:
    from collections.abc import Callable

_LOOK_SECONDS = 0.2
#: Bytes at the end of a log in which its last error is.
_LOG_BYTES = 256 * 1024
#: How long a run may take to save when Ray asks for a checkpoint.
_SAVE_SECONDS = 120.0
#: How often in a row a run that was interrupted is started again without having done a step.
_MOST_RESTARTS = 3


def trainable(
    config: Config, *, metric: str = "evaluation/loss", resources: Mapping[str, float] | None = None
) -> Callable[..., Any]:
    """Return what `ray.tune.Tuner` searches over: its parameters are dotted keys of the config.

    Args:
        config: A config, as `load_config` returns it; its token store is prepared, and shared by all machines.
        metric: The metric whose new values are reported, one report each, with the newest value of every other.
        resources: What Ray reserves for a trial; a GPU, or a processor, for each worker when not given.

    Raises:
        ConfigError: Ray is not installed, or the token store is not prepared.
    """
    with needing("ray", "ray", "a search with Ray Tune"):
        from ray import tune
    if not has_data(config):
        raise ConfigError(
            f"the trials share the token store, and {config.data.store} is not prepared yet",
            where="data.store",
            fix=suggest("data prepare"),
        )
    text = dump_config(with_sources(config))
    settings = TrialSettings(text, str(Path.cwd()), metric)
    gpus = Job(config).gpus
    needs = dict(resources) if resources is not None else {"gpu" if gpus else "cpu": gpus or config.parallel.workers}

    class HeadwayTrial(tune.Trainable):  # type: ignore[misc, name-defined, unused-ignore]
        """A trial of Ray Tune."""

        def setup(self, config: dict[str, Any]) -> None:
            """Make the trial's config; its process starts with the first step."""
            self._trial = RunTrial(settings, config, _storage_of(self._storage), str(self.trial_id))

        def step(self) -> dict[str, Any]:
            """Wait for the next report."""
            return self._trial.next_report()

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            """Save the run, and copy what another one needs to begin from it."""
            self._trial.save(Path(checkpoint_dir))

        def load_checkpoint(self, checkpoint: str) -> None:
            """Continue this run, or begin it anew from that of another trial."""
            self._trial.load(Path(checkpoint))

        def cleanup(self) -> None:
            """Save the run, and end its process."""
            self._trial.stop()

    wrapped: Callable[..., Any] = tune.with_resources(HeadwayTrial, needs)
    return wrapped


def _storage_of(storage: Any) -> Path:
    """Return the folder of a trial in Ray's storage.

    Raises:
        ConfigError: it is no folder.
    """
    if storage is None or storage.storage_filesystem.type_name != "local":
        raise ConfigError(
            "the run of a trial lies in Ray's storage, which is no folder here",
            where="RunConfig.storage_path",
            fix="give a folder that all machines share",
        )
    return Path(storage.trial_fs_path)


@dataclass(frozen=True)
class TrialSettings:
    """Hold what all trials of a search have in common."""

    config: str
    """The config in YAML."""
    folder: str
    """Where the search was started: paths in the config are relative to it."""
    metric: str
    """The metric whose values are reported."""


class RunTrial:
    """The run of one trial.

    Args:
        settings: What all trials have in common.
        values: Values by dotted key of the config.
        storage: The trial's folder.
        name: Name of the run.

    Raises:
        ConfigError: the values make a config that is refused.
    """

    def __init__(self, settings: TrialSettings, values: Mapping[str, Any], storage: Path, name: str) -> None:
        self._settings = settings
        words = [f"{key}={json.dumps(_plain(value))}" for key, value in values.items()]
        given = parse(settings.config, "the config").plain()
        self._config = load_config(given, [*words, *place(name, storage)])
        self._run = RunDirectory(storage / name)
        self._process: subprocess.Popen[bytes] | None = None
        self._history = _History(self._run.metrics_path, settings.metric)
        self._begins = False
        self._restarts = 0

    @property
    def run(self) -> Path:
        """The run directory."""
        return self._run.path

    def next_report(self) -> dict[str, Any]:
        """Wait for a new value of the metric, and return the newest of every metric; `done` with the last one.

        Raises:
            HeadwayError: the run has ended with an error, which has its type and exit code.
        """
        while True:
            if self._process is None:
                self._start()
            assert self._process is not None, "just started"
            code = self._process.poll()  # first: what it has recorded is complete if it has ended
            self._history.read()
            # A report of the last step waits for the end of the process, to be the last one.
            report = self._history.next_before(None if code is not None else self._config.train.steps)
            if code == 0 and not self._history.has_more:
                return {**(report or self._history.newest), "done": True}
            if report is not None:
                return report
            if code is not None:
                self._interrupted(code)
            time.sleep(_LOOK_SECONDS)

    def save(self, folder: Path) -> None:
        """Have the run saved, and copy the newest checkpoint with what another run needs to begin from it."""
        if self._process is not None and self._process.poll() is None:
            self._ask_to_save()
        committed = Ledger(self._run.ledger_path).committed_step
        if committed:
            copy_for_beginning(self._run, committed, folder / self._run.path.name)
        pointer = {"run": self._run.path.name, "id": read_run_id(self._run.path), "step": committed}
        write_json(folder / POINTER, {**pointer, "reported": self._history.reported})

    def load(self, folder: Path) -> None:
        """Continue from what `save` has left: this run where it is, or another trial's at its checkpoint.

        Raises:
            CheckpointError: there is no such checkpoint, or it is damaged.
        """
        self.stop()
        wait_for_owner(self._run.path)
        try:
            pointer = read_json_object(folder / POINTER)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint of Ray has no run: {error}", where=str(folder), fix="begin the search again"
            ) from None
        self._history = _History(self._run.metrics_path, self._settings.metric, int(pointer.get("reported", -1)))
        if not pointer.get("step") or self._is_from(pointer):
            return
        other = folder / str(pointer["run"])
        checkpoint = newest_checkpoint(other)
        options = RunOptions(restart=self._run.has_begun(), accept_changes=True)
        begin_from(other if checkpoint is None else checkpoint, resolve(self._config), options)
        self._begins = True

    def stop(self) -> None:
        """Save the run, and end its process."""
        if self._process is not None:
            end_process(self._process)
            self._process = None

    def _is_from(self, pointer: Mapping[str, Any]) -> bool:
        """Return whether this run is the one that was saved, or has begun from it already."""
        if not self._run.has_begun():
            return False
        if read_run_id(self._run.path) == pointer.get("id"):
            return True
        begun = Ledger(self._run.ledger_path).beginnings()
        return bool(begun) and (begun[-1].run.get("id"), begun[-1].step) == (pointer.get("id"), pointer.get("step"))

    def _start(self) -> None:
        """Start the process, or continue the run where it is."""
        wait_for_owner(self._run.path)
        beside = self._run.path.parent / f"{self._run.path.name}.yaml"
        write_text(beside, dump_config(self._config))
        words = ["--accept-changes"] if self._begins else []
        command = tied_command(module_command("headway", "train", str(beside), *words))
        where = self._settings.folder if Path(self._settings.folder).is_dir() else None
        with beside.with_suffix(".log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=where, env=own_variables())

    def _interrupted(self, code: int) -> None:
        """Start a run again that was interrupted; raise the error of one that has ended for good."""
        self._process = None
        if code not in (Preempted.exit_code, -15):
            log = self._run.path.parent / f"{self._run.path.name}.log"
            raise (error_with(code) or HeadwayError)(
                f"the run of the trial has ended with exit code {code}: {_last_error(log)}",
                where=str(self._run.path),
                fix=f"headway runs show {self._run.path}, and {log}",
            )
        self._restarts = 0 if self._history.has_moved() else self._restarts + 1
        if self._restarts > _MOST_RESTARTS:
            raise HeadwayError(
                f"the run was interrupted {self._restarts} times without a step",
                where=str(self._run.path),
                fix=f"headway runs show {self._run.path} says why",
            )

    def _ask_to_save(self) -> None:
        """Post on the run's board that a checkpoint is wanted, and wait for it."""
        attempt = newest_attempt(self._run.path)
        process = self._process
        ledger = Ledger(self._run.ledger_path)
        wanted = self._history.step
        if attempt is None or process is None:
            return
        with suppress(OSError):
            post(attempt, Notice("ray", "a checkpoint is wanted", "save"))
        wait_until(lambda: ledger.committed_step >= wanted or process.poll() is not None, _SAVE_SECONDS, 0.1)


class _History:
    """What a run has recorded, as reports of a metric.

    Args:
        path: The run's metrics.
        metric: The metric whose new values are reports.
        reported: The step of the last report, before which there are none.
    """

    def __init__(self, path: Path, metric: str, reported: int = -1) -> None:
        self._tail = JsonLinesTail(path)
        self._metric = metric
        self._due: deque[dict[str, Any]] = deque()
        self.newest: dict[str, Any] = {}
        self.reported = reported
        self.step = 0
        self._before = 0

    def read(self) -> None:
        """Read what is new; steps that are trained again are not reported again."""
        with suppress(OSError):
            for begins, records in self._tail.read():
                if begins:
                    self.newest = {}
                for record in records:
                    self._add(record)

    @property
    def has_more(self) -> bool:
        """Whether there are reports that are due."""
        return bool(self._due)

    def next_before(self, step: int | None) -> dict[str, Any] | None:
        """Return the next report before a step, or the next of all for None; None if there is none."""
        if not self._due or (step is not None and self._due[0]["step"] >= step):
            return None
        report = self._due.popleft()
        self.reported = int(report["step"])
        return report

    def has_moved(self) -> bool:
        """Return whether there are steps since the last time this was asked."""
        moved = self.step > self._before
        self._before = self.step
        return moved

    def _add(self, record: Mapping[str, Any]) -> None:
        found = {name: value for name, value in numbers_in(record) if name == "step" or "/" in name}
        self.newest = {**self.newest, **found}
        self.step = int(self.newest.get("step", 0))
        last = int(self._due[-1]["step"]) if self._due else self.reported
        if self._metric in record and self.step > last:
            self._due.append(self.newest)


def _plain(value: Any) -> Any:
    """Return a value of a sampler, which may be one of NumPy's, as JSON has it."""
    return value.item() if hasattr(value, "item") else value


def _last_error(log: Path) -> str:
    """Return the first line of the last error in a log."""
    end = b""
    with suppress(OSError):
        end, _ = read_end(log, _LOG_BYTES)
    errors = [line for line in end.decode("utf-8", "replace").splitlines() if line.startswith("error: ")]
    return errors[-1][7:] if errors else "see its log"
