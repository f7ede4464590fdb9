"""Benchmarks of a model by lm-eval: started in a process of their own, and recorded when they are done."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from headway.checkpoint.save.outcomes import Outcome
from headway.config.sections.benchmarks import AFTER, BenchmarksConfig, is_file
from headway.core.console import notice, warning
from headway.core.coordination.launch_variables import OF_A_WORKER
from headway.core.errors import ConfigError, HeadwayError, missing_extra
from headway.core.files.atomic import write_json
from headway.core.files.foreign import read_json_object, read_json_or_empty
from headway.core.format import format_seconds
from headway.core.process.command import module_command
from headway.training.job import Callback, Job

#: Of a run directory: a file of results for each step that was measured.
FOLDER = "benchmarks"
#: Keep libraries of Hugging Face from asking the Hub.
_OFFLINE = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
#: Endings of what lies next to the results: the order, the log, what the process says of its failure, and the folder
#: with the exported model.
_ORDER = ".order"
_LOG = ".log"
_FAILURE = ".failure"
_EXPORT = ".export"
_FIX = (
    "lm-eval ls tasks lists its tasks; data that are neither files nor in the cache need a download"
    " (evaluation.benchmarks.download=true)"
)


def results_path(run: Path, step: int) -> Path:
    """Return the file with the results of a step."""
    return run / FOLDER / f"step-{step:08d}.json"


def as_metrics(found: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a file of results."""
    metrics = {"evaluation/benchmarks_step": float(found["step"])}
    for task, values in found["results"].items():
        for name, value in values.items():
            benchmark = f"{task} {name}"
            metrics[f"evaluation/benchmarks/{benchmark}"] = float(value)
    return metrics


def wanted_by_hand(tasks: Sequence[str], *, device: str, **settings: Any) -> BenchmarksConfig:
    """Return the benchmarks that a command asks for.

    Raises:
        ConfigError: a file does not exist, or the device is none.
    """
    names = [task.strip() for task in tasks if task.strip()]
    for task in names:
        if is_file(task) and not Path(task).is_file():
            raise ConfigError(f"there is no file {task}", where="--tasks", fix="correct its path, or name a task")
    try:
        return BenchmarksConfig(tasks=names, device=device, **settings)
    except ValidationError as error:
        what = "; ".join(str(one["msg"]) for one in error.errors())
        raise ConfigError(what, where="--tasks, --device", fix="--tasks NAME[,NAME...] --device cpu") from None


def check_installed() -> None:
    """Check that lm-eval is installed.

    Raises:
        ConfigError: it is not.
    """
    if find_spec("lm_eval") is None:
        raise missing_extra("lm-eval", "lm-eval", "benchmarks")


@dataclass
class BenchmarkProcess:
    """Benchmarks that are being run."""

    process: subprocess.Popen[bytes]
    output: Path
    log: Path
    seconds: float
    """How long they may take."""
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def start(
        cls,
        model: Path,
        step: int | None,
        wanted: BenchmarksConfig,
        output: Path,
        *,
        device: str,
        nice: int = 0,
        items: bool = False,
    ) -> BenchmarkProcess:
        """Start benchmarks of a run's checkpoint, or of a Hugging Face folder.

        Args:
            model: Run directory or folder.
            step: Of the checkpoint; the newest good one if None.
            wanted: The tasks, and how they are run.
            output: File for the results; its log gets the same name.
            device: `cpu` or `cuda:N`, a GPU as this process counts them.
            nice: By how much its priority is lower.
            items: Whether the results also hold those of every item.

        Raises:
            ConfigError: lm-eval is not installed, or this process has no such GPU.
        """
        check_installed()
        # The process sees no other GPU, so it cannot take memory on one by accident.
        gpus = _visible_gpu(device)
        output.parent.mkdir(parents=True, exist_ok=True)
        order, log, failure, place = (output.with_suffix(ending) for ending in (_ORDER, _LOG, _FAILURE, _EXPORT))
        settings = wanted.model_dump(mode="json", include={"tasks", "limit", "few_shot", "rows"})
        given = {"model": str(model), "step": step, "output": str(output), "nice": nice, "place": str(place)}
        given |= {"parent": os.getpid(), "failure": str(failure), "items": items}
        write_json(order, {**settings, **given, "device": "cpu" if device == "cpu" else "cuda:0"})
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus, "TOKENIZERS_PARALLELISM": "false"}
        environment |= {} if wanted.download else _OFFLINE
        for name in OF_A_WORKER:
            environment.pop(name, None)
        command = module_command("headway.training.evaluation.benchmark_process", str(order))
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
            )
        return cls(process, output, log, wanted.timeout_seconds)

    @property
    def has_ended(self) -> bool:
        """Whether `results` does not have to wait."""
        return self.process.poll() is not None or time.monotonic() - self.began > self.seconds

    def results(self) -> dict[str, Any]:
        """Wait for the end, and return the results.

        Raises:
            HeadwayError: there are none; its words are those of the process, and the log has the traceback.
        """
        try:
            code = self.process.wait(max(0.0, self.began + self.seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.stop()
            raise HeadwayError(
                f"the benchmarks were ended after {format_seconds(self.seconds)}",
                where=str(self.log),
                fix="raise evaluation.benchmarks.timeout_seconds (--timeout), or set a limit of documents per task",
            ) from None
        except BaseException:
            self.stop()
            raise
        why = read_json_or_empty(self.output.with_suffix(_FAILURE))  # empty if it was killed, or did not fail
        self._remove_order()
        if code == 0:
            try:
                return read_json_object(self.output)
            except (OSError, ValueError) as error:
                why = {"what": str(error)}
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        what = f"the benchmarks failed: {why.get('what') or ended}"
        if place := why.get("where"):
            what = f"{what} ({place})"
        raise HeadwayError(what, where=str(self.log), fix=str(why.get("fix") or _FIX))

    def stop(self) -> None:
        """End it, with the processes that it has started."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._remove_order()

    def _remove_order(self) -> None:
        """Remove what the process was given, and the export, which it cannot do when it is killed."""
        for ending in (_ORDER, _FAILURE):
            self.output.with_suffix(ending).unlink(missing_ok=True)
        shutil.rmtree(self.output.with_suffix(_EXPORT), ignore_errors=True)


def _visible_gpu(device: str) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES for a process that uses one device as this process counts them."""
    if device == "cpu":
        return ""
    number = int(device.removeprefix("cuda:"))
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if seen is None:
        return str(number)
    gpus = [gpu.strip() for gpu in seen.split(",") if gpu.strip()]
    if number >= len(gpus):
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={seen} leaves this process no {device}",
            where="the device of the benchmarks",
            fix="name one of those, or cpu",
        )
    return gpus[number]


def run_benchmarks(
    model: Path, step: int | None, wanted: BenchmarksConfig, device: str, *, items: bool = False
) -> dict[str, Any]:
    """Run benchmarks, wait for them, and return their results, with those of every `items` if that is asked for.

    Raises:
        ConfigError: lm-eval is not installed.
        HeadwayError: they failed; their log is kept, and the error names it.
    """
    place = Path(tempfile.mkdtemp(prefix="headway-benchmark-"))
    output = place / "results.json"
    keeps_log = False
    try:
        return BenchmarkProcess.start(model, step, wanted, output, device=device, items=items).results()
    except HeadwayError:
        keeps_log = output.with_suffix(_LOG).is_file()
        raise
    finally:
        if not keeps_log:
            shutil.rmtree(place, ignore_errors=True)


class Benchmarks(Callback):
    """Runs benchmarks beside training, one at a time, and adds their results to the step at which they are known.

    A failure is a warning: training does not depend on it. What has not ended by the end of training is ended.

    Args:
        run: Run directory.
        wanted: With a device beside training.
    """

    def __init__(self, run: Path, wanted: BenchmarksConfig) -> None:
        self._run = run
        self._wanted = wanted
        self._reached: int | None = None
        self._going: BenchmarkProcess | None = None

    def on_start(self, job: Job) -> None:
        """Remember which multiples are past, and remove what a killed attempt has left."""
        self._reached = self._multiple(job, job.state.cursor.step)
        for left in (self._run / FOLDER).glob(f"*{_EXPORT}"):  # of an attempt that was killed
            shutil.rmtree(left, ignore_errors=True)

    def on_saved(self, job: Job, outcome: Outcome) -> None:
        """Start benchmarks of a checkpoint that is the first after a multiple, unless the last ones are under way."""
        multiple = self._multiple(job, outcome.step)
        last = job.ends_at(outcome.step)  # that one is measured when training has ended
        if outcome.error is not None or self._reached is None or multiple <= self._reached or self._going or last:
            return
        self._reached = multiple
        path = results_path(self._run, outcome.step)
        try:
            self._going = BenchmarkProcess.start(
                self._run, outcome.step, self._wanted, path, device=self._wanted.device, nice=10
            )
        except (OSError, HeadwayError) as error:
            warning(f"no benchmarks of step {outcome.step:,}: {error}")

    def on_step(self, job: Job, step: int, metrics: dict[str, float]) -> None:
        """Add results that have come."""
        if self._going is None or not self._going.has_ended:
            return
        going = self._going
        self._going = None
        try:
            metrics.update(as_metrics(going.results()))
        except HeadwayError as error:
            warning(f"{error.what} ({error.where})")

    def on_end(self, job: Job) -> None:
        """End what has not ended."""
        if self._going is not None:
            self._going.stop()
            self._going = None

    def _multiple(self, job: Job, step: int) -> int:
        every = self._wanted.every
        assert every is not None, "checked"
        done = step if every.unit == "steps" else job.config.train.batches.tokens_before(step)
        return int(done // every.amount)


def benchmark_at_end(run: Path, step: int, wanted: BenchmarksConfig, device: str) -> dict[str, float]:
    """Run benchmarks of a finished run if that was not done, and return their metrics; empty if there is nothing new.

    A failure is a warning, and the next call tries again.
    """
    path = results_path(run, step)
    if path.is_file():
        return {}
    where = device if wanted.device == AFTER else wanted.device
    notice(f"benchmarks of step {step:,} on {where}: {', '.join(wanted.tasks)}")
    try:
        found = BenchmarkProcess.start(run, step, wanted, path, device=where).results()
    except (OSError, HeadwayError) as error:
        what = error.render() if isinstance(error, HeadwayError) else str(error)
        warning(f"no benchmarks of step {step:,}: {what}")
        return {}
    for task, values in found["results"].items():
        notice(f"{task}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items()))
    return as_metrics(found)
