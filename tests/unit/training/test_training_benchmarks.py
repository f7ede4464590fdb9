"""Benchmarks run in a process of their own, offline, off the trainer's GPUs, and no training depends on them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.checkpoint.save.outcomes import Outcome
from headway.config import Config
from headway.config.checks.contradictions import find_problems
from headway.config.sections.benchmarks import BenchmarksConfig
from headway.config.units import Interval
from headway.core.errors import CheckpointError, ConfigError, HeadwayError
from headway.core.requirements import install_command
from headway.run.session.parts import check_installed_for
from headway.telemetry.catalogue import metric
from headway.telemetry.record import open_run
from headway.telemetry.report import render_report
from headway.training.evaluation import benchmarks
from headway.training.evaluation.benchmark_process import _metrics
from headway.training.evaluation.benchmarks import (
    BenchmarkProcess,
    Benchmarks,
    as_metrics,
    benchmark_at_end,
    run_benchmarks,
)

#: Stands for lm-eval: its results say how it was called, and what it sees.
STUB = """
import json, os, sys

def simple_evaluate(**given):
    if "killed" in given["tasks"]:
        os.kill(os.getpid(), 9)
    if "missing" in given["tasks"]:
        raise ValueError("no task missing,\\n  only known")
    offline = [f"HF_{library}_OFFLINE" for library in ("HUB", "DATASETS", "EVALUATE")]
    seen = {name: os.environ.get(name) for name in (*offline, "CUDA_VISIBLE_DEVICES")}
    if "wait" in given["tasks"]:
        print(os.getpid(), flush=True)
        __import__("time").sleep(600)
    manager, model = given.pop("task_manager"), given.pop("model")
    print(json.dumps({**given, **vars(manager), **vars(model), **seen, "nice": os.nice(0)}))
    results = {"acc,none": 0.25, "acc_stderr,none": "N/A", "ppl,strict": 8.5, "alias": "x", "sample_len": 9}
    found = {"results": dict.fromkeys(given["tasks"], results)}
    if given["log_samples"]:
        of_item = [
            {"doc_id": n, "filter": "none", "metrics": ["acc", "words"], "acc": n % 2, "words": (1.5, 3)}
            for n in range(4)
        ]
        strict = [{"doc_id": n, "filter": "strict", "metrics": ["ppl"], "ppl": n + 0.5} for n in range(2)]
        found["samples"] = dict.fromkeys(given["tasks"], of_item + strict)
        found["higher_is_better"] = dict.fromkeys(given["tasks"], {"acc": True, "ppl": False})
    return found
"""
KEEP = "class {}:\n def __init__(self, **given):\n  self.__dict__ = given\n"


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for models and results, with the stub on the path of new processes."""
    package = tmp_path / "stub" / "lm_eval"
    (package / "models").mkdir(parents=True)
    (package / "__init__.py").write_text(STUB)
    (package / "models" / "__init__.py").touch()
    (package / "models" / "huggingface.py").write_text(KEEP.format("HFLM"))
    (package / "tasks.py").write_text(KEEP.format("TaskManager"))
    (package.parent / "lm_eval-0.1.dist-info").mkdir()
    (package.parent / "lm_eval-0.1.dist-info" / "METADATA").write_text("Name: lm_eval\nVersion: 0.1\n")
    monkeypatch.syspath_prepend(package.parent)
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "mine.yaml").write_text("# a task\ntask: 'my_task'  # its name\ndataset_path: json\n")
    return tmp_path


def said(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output.with_suffix(".log").read_text().splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("device", "visible", "download", "seen"),
    [
        ("cpu", None, False, {"device": "cpu", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}),
        ("cuda:1", None, False, {"device": "cuda:0", "CUDA_VISIBLE_DEVICES": "1", "HF_EVALUATE_OFFLINE": "1"}),
        ("cuda:1", "6,4", True, {"device": "cuda:0", "CUDA_VISIBLE_DEVICES": "4", "HF_HUB_OFFLINE": None}),
    ],
)
def test_the_process_sees_its_device_and_no_network(
    stub: Path, monkeypatch: pytest.MonkeyPatch, device: str, visible: str | None, download: bool, seen: dict[str, Any]
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    task = str(stub / "mine.yaml")
    wanted = BenchmarksConfig(tasks=[task, "known"], limit=7, few_shot=2, rows=3, download=download)
    output = stub / "results" / "one.json"
    found = BenchmarkProcess.start(stub / "model", None, wanted, output, device=device, nice=3).results()
    assert found["results"] == {task: {"acc": 0.25, "ppl(strict)": 8.5} for task in ("my_task", "known")}
    assert found["lm_eval"] == "0.1" and found["limit"] == 7 and json.loads(output.read_text()) == found
    called = said(output)
    assert seen.items() <= called.items()
    assert called["pretrained"] == str(stub / "model") and called["batch_size"] == 3
    assert called["nice"] == min(os.nice(0) + 3, 19)
    assert (called["limit"], called["num_fewshot"], called["tasks"]) == (7, 2, ["my_task", "known"])
    assert called["include_path"] == [str(stub)] and called["include_defaults"] is True
    assert not output.with_suffix(".order").exists()


def test_results_of_every_item_on_request(stub: Path) -> None:
    """Of the metrics that are means over items: not of a perplexity of words, whose items have two numbers."""
    found = run_benchmarks(stub / "model", None, BenchmarksConfig(tasks=["known"]), "cpu", items=True)
    assert found["items"]["known"] == {
        "metrics": {"acc": {"0": 0.0, "1": 1.0, "2": 0.0, "3": 1.0}, "ppl(strict)": {"0": 0.5, "1": 1.5}},
        "higher_is_better": {"acc": True, "ppl(strict)": False},
    }
    assert "items" not in run_benchmarks(stub / "model", None, BenchmarksConfig(tasks=["known"]), "cpu")


def test_a_failure_names_its_reason_and_log(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a message of three lines; the traceback is in the log, which is kept."""
    monkeypatch.setattr(tempfile, "tempdir", str(stub / "kept"))
    (stub / "kept").mkdir()
    with pytest.raises(HeadwayError, match="the benchmarks failed: ValueError: no task missing, only") as caught:
        run_benchmarks(stub / "model", None, BenchmarksConfig(tasks=["missing"]), "cpu")
    assert "Traceback" not in caught.value.render() and len(caught.value.render().splitlines()) == 3
    log = Path(str(caught.value.where))
    assert "Traceback" in log.read_text() and [path.name for path in log.parent.iterdir()] == ["results.log"]
    with pytest.raises(HeadwayError, match="the benchmarks failed: signal 9\n"):
        run_benchmarks(stub / "model", None, BenchmarksConfig(tasks=["killed"]), "cpu")
    run = stub / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("train: {steps: 1}")
    with pytest.raises(HeadwayError, match="no checkpoint") as caught:
        run_benchmarks(run, None, BenchmarksConfig(tasks=["known"]), "cpu")
    assert "fix" not in caught.value.what and str(run) in caught.value.what, caught.value.what
    left = len(list((stub / "kept").iterdir()))
    run_benchmarks(stub / "model", None, BenchmarksConfig(tasks=["known"]), "cpu")
    assert len(list((stub / "kept").iterdir())) == left == 3, "the log of a success is not kept"
    assert benchmark_at_end(stub / "model", 5, BenchmarksConfig(tasks=["missing"]), "cpu") == {}, "only a warning"


def test_what_takes_too_long_is_ended(stub: Path) -> None:
    wanted = BenchmarksConfig(tasks=["wait"], timeout_seconds=0.3)
    output = stub / "results.json"
    going = BenchmarkProcess.start(stub / "model", None, wanted, output, device="cpu")
    assert not going.has_ended
    with pytest.raises(HeadwayError, match="ended after") as caught:
        going.results()
    assert "timeout_seconds" in str(caught.value.fix) and going.has_ended
    assert going.process.poll() == -signal.SIGKILL and not output.with_suffix(".order").exists()
    assert benchmark_at_end(stub / "model", 5, wanted, "cpu") == {}, "only a warning"


def test_the_end_is_measured_once(stub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = BenchmarksConfig(tasks=["known"])
    # The folder stands for a run directory; what is measured in it is the folder itself.
    metrics = benchmark_at_end(stub / "model", 5, wanted, "cpu")
    assert metrics["evaluation/benchmarks/known acc"] == 0.25 and all(metric(name) for name in metrics)
    assert "known: acc 0.25, ppl(strict) 8.5" in capsys.readouterr().err
    assert benchmark_at_end(stub / "model", 5, wanted, "cpu") == {}


def test_without_lm_eval_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="lm-eval") as caught:
        run_benchmarks(tmp_path, None, BenchmarksConfig(tasks=["known"]), "cpu")
    assert caught.value.fix == install_command("lm-eval")


@pytest.mark.parametrize("visible", ["", "3"])
def test_a_gpu_that_is_not_visible_is_refused(stub: Path, monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError, match="leaves this process no cuda:1"):
        run_benchmarks(stub / "model", None, BenchmarksConfig(tasks=["known"], device="cuda:1"), "cuda:1")


def test_a_run_with_benchmarks_needs_lm_eval_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks, "find_spec", lambda name: None)
    config = Config.model_validate({"evaluation": {"benchmarks": {"tasks": ["known"]}}})
    with pytest.raises(ConfigError, match="lm-eval"):
        check_installed_for(config)


START = """
import sys
from pathlib import Path
from headway.config.sections.benchmarks import BenchmarksConfig
from headway.training.evaluation.benchmarks import BenchmarkProcess

output = Path(sys.argv[2])
going = BenchmarkProcess.start(Path(sys.argv[1]), None, BenchmarksConfig(tasks=["wait"]), output, device="cpu")
print(going.process.pid)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
def test_benchmarks_end_with_the_process_that_has_started_them(stub: Path) -> None:
    command = [sys.executable, "-c", START, str(stub / "model"), str(stub / "results" / "one.json")]
    environment = {"PATH": "/usr/bin", "PYTHONPATH": ":".join(sys.path)}
    number = int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    started = Path("/proc", str(number), "stat")
    ends = time.monotonic() + 30
    while started.exists() and started.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < ends, "it goes on alone"
        time.sleep(0.05)


def test_numbers_are_taken_from_what_lm_eval_says() -> None:
    said = {"name": "x", "acc,none": 1, "acc_stderr,none": 0.1, "exact,flexible": 0.5, "text,none": "N/A"}
    assert _metrics(said) == {"acc": 1.0, "exact(flexible)": 0.5}


class Started:
    """Stands for benchmarks under way."""

    def __init__(self, step: int | None) -> None:
        self.step, self.code, self.stopped = step, None, False
        self.code: int | None = None

    @property
    def has_ended(self) -> bool:
        return self.code is not None

    def results(self) -> dict[str, Any]:
        if self.code:
            raise HeadwayError("they failed", where="x.log")
        return {"step": self.step, "results": {"t": {"acc": 0.5}}}

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    found: list[Started] = []

    def start(run: Path, step: int | None, *_: Any, device: str, nice: int) -> Started:
        assert device == "cpu" and nice > 0
        found.append(Started(step))
        return found[-1]

    monkeypatch.setattr(BenchmarkProcess, "start", start)
    return found


def job(step: int = 0, total: int = 100) -> Any:
    batches = SimpleNamespace(tokens_before=lambda step: step * 10)
    cursor = SimpleNamespace(step=step)
    config = SimpleNamespace(train=SimpleNamespace(batches=batches))
    return SimpleNamespace(state=SimpleNamespace(cursor=cursor), ends_at=lambda step: step >= total, config=config)


def test_an_export_does_not_outlive_its_process(stub: Path, tmp_path: Path) -> None:
    output = tmp_path / "benchmarks" / "step-00000020.json"
    going = BenchmarkProcess.start(stub / "model", None, BenchmarksConfig(tasks=["known"]), output, device="cpu")
    exported = Path(json.loads(output.with_suffix(".order").read_text())["place"])
    exported.mkdir()
    going.stop()
    assert not exported.exists() and not output.with_suffix(".order").exists()
    exported.mkdir()  # the supervisor was killed
    wanted = BenchmarksConfig(tasks=["t"], every=Interval(20, "steps"), device="cpu")
    Benchmarks(tmp_path, wanted).on_start(job())
    assert not exported.exists()


@pytest.mark.parametrize("every", ["20 steps", "200 tokens"])
def test_the_first_checkpoint_from_each_multiple_on_is_measured(
    tmp_path: Path, started: list[Started], every: str
) -> None:
    wanted = BenchmarksConfig(tasks=["t"], every=Interval.parse(every), device="cpu")
    callback, here = Benchmarks(tmp_path, wanted), job(step=15)
    callback.on_start(here)
    for step in (15, 18):
        callback.on_saved(here, Outcome(step))
    assert not started
    callback.on_saved(here, Outcome(20, error=CheckpointError("the disk is full")))
    callback.on_saved(here, Outcome(24))
    callback.on_saved(here, Outcome(40))  # one at a time
    assert [one.step for one in started] == [24]
    callback.on_step(here, 41, metrics := dict[str, float]())
    assert metrics == {}, "it has not ended"
    started[0].code = 0
    callback.on_step(here, 42, metrics)
    assert metrics == {"evaluation/benchmarks_step": 24.0, "evaluation/benchmarks/t acc": 0.5}
    callback.on_saved(here, Outcome(44))
    callback.on_end(here)
    assert [one.step for one in started] == [24, 44] and [one.stopped for one in started] == [False, True]
    callback.on_saved(here, Outcome(100))
    assert len(started) == 2, "the end is measured when training has ended"


def test_a_failure_beside_training_is_a_warning(
    tmp_path: Path, started: list[Started], capsys: pytest.CaptureFixture[str]
) -> None:
    callback = Benchmarks(tmp_path, BenchmarksConfig(tasks=["t"], every=Interval.parse("10 steps"), device="cpu"))
    callback.on_start(job())
    callback.on_saved(job(), Outcome(10))
    started[0].code = 1
    callback.on_step(job(), 11, metrics := dict[str, float]())
    assert metrics == {} and "they failed (x.log)" in capsys.readouterr().err
    callback.on_saved(job(), Outcome(20))
    assert len(started) == 2, "the next ones are tried"


@pytest.mark.parametrize(
    ("values", "device", "where"),
    [
        ({"device": "after", "every": "10 steps"}, "cpu", "evaluation.benchmarks.every"),
        ({"device": "cuda:1", "every": "10 steps"}, "auto", "evaluation.benchmarks.device"),
        ({"device": "cuda:2", "every": "10 steps"}, "cuda", None),
        ({"device": "cuda:0", "every": "10 steps"}, "cpu", None),
        ({"tasks": ["not/there.yaml"]}, "cpu", "evaluation.benchmarks.tasks"),
    ],
)
def test_what_cannot_be_done_is_refused_before_training(values: dict[str, Any], device: str, where: str | None) -> None:
    config = Config.model_validate(
        {
            "train": {"steps": 10, "device": device, "global_batch": 8},
            "parallel": {"workers": 2},
            "evaluation": {"benchmarks": {"tasks": ["known"], **values}},
        }
    )
    found = [problem.where or "" for problem in find_problems(config) if "benchmarks" in (problem.where or "")]
    assert [one.split(",")[0] for one in found] == ([] if where is None else [where])


def test_the_report_shows_results(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "benchmarks").mkdir(parents=True)
    (run / "config.yaml").write_text("name: x\n")
    found = {"step": 1200, "results": {"my_task": {"acc": 0.125}}, "limit": 50, "lm_eval": "0.4"}
    (run / "benchmarks/step-00001200.json").write_text(json.dumps(found))
    (run / "benchmarks/step-00000600.json").write_text("[damaged")
    text = render_report(open_run(run))
    assert "my_task" in text and "0.125" in text and "1,200" in text and "at most 50 documents per task" in text
    assert as_metrics(found)["evaluation/benchmarks_step"] == 1200.0
