"""Runs to follow, made by hand, and trackers in memory: a sink, and MLflow's client with its server."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import yaml

from headway.tracking.sink import Batch, Description, Status, TrackedRun, Unreachable

RUN_ID = "ab" * 16


class Crash(BaseException):
    """The end of a process, at any line."""


class Gate:
    """Counts the places where a process may die, and ends it at one of them."""

    def __init__(self, ends_at: int = -1) -> None:
        self.ends_at, self.passed = ends_at, 0

    def __call__(self) -> None:
        self.passed += 1
        if self.passed - 1 == self.ends_at:
            raise Crash


def record(step: int, attempt: int = 1, **values: float | str) -> dict[str, Any]:
    """A record of a step; names have `__` for the slash."""
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return {"step": step, "attempt": attempt, "time": 1000.0 + step + 100 * attempt, **named}


def steps(first: int, last: int, attempt: int = 1, factor: float = 1.0) -> list[dict[str, Any]]:
    """Records of consecutive steps: the loss follows from the step alone, the time of a step does not."""
    return [
        record(step, attempt, train__loss=factor / step, speed__step_seconds=0.1 * attempt + step)
        for step in range(first, last + 1)
    ]


def write_run(
    folder: Path,
    records: Sequence[Mapping[str, Any]],
    *,
    outcomes: Sequence[str | None] = ("finished",),
    configs: Sequence[str] = (),
    name: str = "tiny",
    **config: Any,
) -> Path:
    """A run directory.

    Args:
        folder: Its parent.
        records: The records of `metrics.jsonl`.
        outcomes: Of its attempts, in order; None has not ended.
        configs: Fingerprints of the attempts' configs, if they are to differ.
        name: Its name.
        config: More keys of its config.
    """
    run = folder / name
    run.mkdir(parents=True)
    values = {"name": name, "train": {"steps": 10}, "data": {"sources": [{"name": "corpus", "path": "c.jsonl"}]}}
    (run / "config.yaml").write_text(yaml.safe_dump({**values, **config}))
    facts = {
        "id": RUN_ID,
        "fingerprints": {"data": "d" * 64, "config": "c" * 64},
        "git": {"commit": "0123abc"},
        "environment": {"python": "3.11.7", "packages": {"torch": "2.11.0"}},
    }
    (run / "run.json").write_text(json.dumps(facts))
    for number, outcome in enumerate(outcomes, start=1):
        attempt = run / "attempts" / f"{number:03d}"
        attempt.mkdir(parents=True)
        ending = {} if outcome is None else {"outcome": outcome, "ended": 2000.0 + number}
        (attempt / "attempt.json").write_text(json.dumps({"number": number, "started": 1000.0, **ending}))
        if configs:
            fingerprints = {"fingerprints": {"config": configs[number - 1]}}
            (attempt / "run.json").write_text(json.dumps({**facts, **fingerprints}))
    append(run, records)
    return run


def append(run: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Append records, as the run does."""
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


class MemorySink:
    """A tracker that keeps what it gets, by generation, and asks for nothing."""

    def __init__(self, gate: Callable[[], None] = lambda: None) -> None:
        self.gate = gate
        self.opened: list[TrackedRun] = []
        self.points: dict[int, list[tuple[str, int, float]]] = {}
        self.certain: dict[int, set[tuple[str, int]]] = {}
        self.descriptions: list[Description] = []
        self.statuses: list[Status] = []
        self.failures = 0
        self.uncertain: list[bool] = []

    def open(self, run: TrackedRun, state: Mapping[str, Any]) -> Mapping[str, Any]:
        self.gate()
        self.opened.append(run)
        return {"opened": len(self.opened)}

    def describe(self, description: Description) -> Mapping[str, Any]:
        self.gate()
        self.descriptions.append(description)
        return {"opened": len(self.opened)}

    def send(self, batch: Batch) -> Mapping[str, Any] | None:
        if self.failures:
            self.failures -= 1
            raise Unreachable("connection refused")
        self.gate()
        found = self.points.setdefault(self.opened[-1].generation, [])
        there = {(name, step) for name, step, _ in found} if batch.uncertain else set()
        found += [(p.name, p.step, p.value) for p in batch.points if (p.name, p.step) not in there]
        self.uncertain.append(batch.uncertain)
        self.gate()
        return {"opened": len(self.opened)}

    def flush(self) -> Mapping[str, Any]:
        return {"opened": len(self.opened)}

    def set_status(self, status: Status, ended: float | None) -> None:
        self.gate()
        self.statuses.append(status)

    def close(self) -> None:
        pass


class FakeMlflow:
    """MLflow's client with a server behind it that keeps every metric that it gets, also one that it has."""

    def __init__(self, gate: Callable[[], None] = lambda: None) -> None:
        self.gate = gate
        self.runs: dict[str, Any] = {}
        self.experiments: dict[str, str] = {}
        self.requests: list[str] = []
        self.error: Exception | None = None

    def install(self, monkeypatch: Any) -> None:
        """Stand in for the package `mlflow`."""
        entity: Callable[..., Any] = _entity
        entities = ModuleType("mlflow.entities")
        entities.__dict__.update(
            Metric=lambda key, value, timestamp, step: entity(key=key, value=value, timestamp=timestamp, step=step),
            Param=lambda key, value: entity(key=key, value=value),
            RunTag=lambda key, value: entity(key=key, value=value),
            InputTag=lambda key, value: entity(key=key, value=value),
            Dataset=lambda name, digest, **facts: entity(name=name, digest=digest, **facts),
            DatasetInput=lambda dataset, tags: entity(dataset=dataset, tags=tags),
        )
        exceptions = ModuleType("mlflow.exceptions")
        exceptions.__dict__.update(MlflowException=FakeMlflowError)
        package = ModuleType("mlflow")
        package.__dict__.update(MlflowClient=lambda tracking_uri: self, entities=entities, exceptions=exceptions)
        for module in (package, entities, exceptions):
            monkeypatch.setitem(sys.modules, module.__name__, module)

    def _request(self, name: str) -> None:
        self.requests.append(name)
        self.gate()
        if self.error is not None:
            raise self.error

    def get_experiment_by_name(self, name: str) -> Any:
        self._request("get experiment")
        number = self.experiments.get(name)
        return None if number is None else SimpleNamespace(experiment_id=number, lifecycle_stage="active")

    def create_experiment(self, name: str) -> str:
        self._request("create experiment")
        self.experiments[name] = str(len(self.experiments))
        self.gate()
        return self.experiments[name]

    def create_run(self, experiment: str, start_time: int | None, tags: Mapping[str, str], run_name: str) -> Any:
        self._request("create run")
        number = f"run{len(self.runs)}"
        self.runs[number] = SimpleNamespace(
            info=SimpleNamespace(run_id=number, lifecycle_stage="active", start_time=start_time, status="RUNNING"),
            data=SimpleNamespace(metrics={}, _metric_objs=[], params={}, tags={**tags, "mlflow.runName": run_name}),
            inputs=SimpleNamespace(dataset_inputs=[]),
            logged=[],
            files={},
            end=None,
        )
        self.gate()
        return self.runs[number]

    def search_runs(self, experiments: Sequence[str], text: str, max_results: int) -> list[Any]:
        self._request("search")
        wanted = dict(part.replace("tags.`", "").split("` = ") for part in text.split(" and "))
        return [
            run
            for run in self.runs.values()
            if all(run.data.tags.get(name) == value.strip("'") for name, value in wanted.items())
            and run.info.lifecycle_stage == "active"
        ]

    def get_run(self, number: str) -> Any:
        self._request("get run")
        if number not in self.runs:
            raise FakeMlflowError(404, "RESOURCE_DOES_NOT_EXIST")
        run = self.runs[number]
        newest: dict[str, Any] = {}
        for metric in run.logged:
            if metric.key not in newest or metric.step >= newest[metric.key].step:
                newest[metric.key] = metric
        run.data._metric_objs = list(newest.values())
        run.data.metrics = {key: metric.value for key, metric in newest.items()}
        return run

    def delete_run(self, number: str) -> None:
        self._request("delete run")
        self.runs[number].info.lifecycle_stage = "deleted"

    def log_batch(
        self, number: str, metrics: Sequence[Any] = (), params: Sequence[Any] = (), tags: Sequence[Any] = (),
        synchronous: bool = False,
    ) -> None:  # fmt: skip
        assert synchronous and len(metrics) <= 1000 and len(params) <= 100 and len(tags) <= 100
        self._request("log")
        run = self.runs[number]
        for param in params:
            assert run.data.params.setdefault(param.key, param.value) == param.value, "a parameter never changes"
        run.data.tags.update({tag.key: tag.value for tag in tags})
        run.logged += metrics
        self.gate()

    def get_metric_history(self, number: str, key: str) -> list[Any]:
        self._request("history")
        return [metric for metric in self.runs[number].logged if metric.key == key]

    def log_inputs(self, number: str, datasets: Sequence[Any]) -> None:
        self._request("inputs")
        self.runs[number].inputs.dataset_inputs += datasets
        self.gate()

    def log_text(self, number: str, text: str, name: str) -> None:
        self._request("file")
        self.runs[number].files[name] = text
        self.gate()

    def update_run(self, number: str, status: str) -> None:
        self._request("status")
        self.runs[number].info.status = status
        self.gate()

    def set_terminated(self, number: str, status: str, end: int | None) -> None:
        self._request("status")
        self.runs[number].info.status, self.runs[number].end = status, end
        self.gate()


class FakeMlflowError(Exception):
    """An answer of the server that is an error."""

    def __init__(self, status: int, error_code: str = "INTERNAL_ERROR", text: str = "no") -> None:
        super().__init__(text)
        self.status, self.error_code = status, error_code

    def get_http_status_code(self) -> int:
        return self.status


def _entity(**facts: Any) -> SimpleNamespace:
    return SimpleNamespace(**facts)
