"""Benchmarks whose promise is missed say so by their exit code; it is no test of how fast anything is."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
if not BENCHMARKS.exists():
    pytest.skip("the benchmarks are not part of this copy", allow_module_level=True)


def load(script: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"headway_{Path(script).stem}", BENCHMARKS / script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def exit_code(module: Any, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> Any:
    monkeypatch.setattr(sys, "argv", [module.__file__, *map(str, arguments)])
    try:
        module.main()
    except SystemExit as end:
        return end.code
    return 0


@pytest.mark.parametrize(
    ("stall", "total", "code"), [(0.11, 1.1, 0), (0.13, 1.1, 1), (0.11, 1.3, 1)], ids=["met", "stall", "total"]
)
def test_a_save(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stall: float,
    total: float,
    code: int,
) -> None:
    save, output = load("checkpoint/save.py"), tmp_path / "save.json"

    def took(stall: float, total: float) -> list[dict[str, float]]:
        return [{"stall_seconds": stall, "total_seconds": total, "flushed_seconds": total}]

    found = {"copy": took(0.1, 0.1), "disk": took(1.0, 1.0), "headway": took(stall, total)}
    monkeypatch.setattr(save, "measure", lambda *_: found)
    monkeypatch.setattr(save, "Ours", lambda *_: SimpleNamespace(save=None, close=lambda: None))
    monkeypatch.setattr(save, "distributed", lambda kind: None)
    only = ("--megabytes", 1, "--only", "copy", "disk", "headway", "--output", output)
    assert exit_code(save, monkeypatch, *only) == code
    assert ("MISSED" in capsys.readouterr().out) == bool(code)
    kept = json.loads(output.read_text())["promises"]
    assert [p["what"] for p in kept if p["times"] > p["at_most"]] == (
        ["stall of a copy"] if stall > 0.12
        else ["total of the disk's floor", "the same of the quickest rounds"] if total > 1.2 else []
    )  # fmt: skip


@pytest.mark.parametrize(("ratio", "code"), [(0.96, 0), (0.94, 1)])
def test_goodput(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ratio: float, code: int
) -> None:
    goodput, output = load("supervise/goodput.py"), tmp_path / "goodput.json"
    process = SimpleNamespace(send_signal=lambda number: None, wait=lambda: 0)
    fake = SimpleNamespace(run=lambda *_, **__: None, Popen=lambda *_: process)
    monkeypatch.setattr(goodput, "subprocess", fake)
    monkeypatch.setattr(goodput, "open_run", lambda run: None)
    monkeypatch.setattr(goodput, "goodput_of", lambda run: SimpleNamespace(ratio=ratio, wall_seconds=1e9))
    monkeypatch.setattr(goodput, "first_steps", lambda run: {1: time.time()})
    monkeypatch.setattr(goodput, "first_start", lambda run: 2.0)
    assert exit_code(goodput, monkeypatch, "--minutes", 0.001, "--every", 0.05, "--output", output) == code
    assert ("MISSED" in capsys.readouterr().out) == bool(code)
    assert json.loads(output.read_text())["ratio"] == ratio


def test_the_first_start_is_without_the_first_step_and_what_comes_before_the_attempt(tmp_path: Path) -> None:
    """Both are in neither part of the ratio that it is taken off, or in both."""
    goodput = load("supervise/goodput.py")
    attempt = tmp_path / "attempts/001/attempt.json"
    attempt.parent.mkdir(parents=True)
    attempt.write_text(json.dumps({"number": 1, "started": 100.0, "ended": 200.0}))
    records = [{"step": 0, "time": 101.0}, {"step": 1, "time": 105.0, "train/loss": 1.0, "speed/step_seconds": 1.5}]
    lines = [json.dumps({"attempt": 1, **record}) + "\n" for record in records]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert goodput.first_start(tmp_path) == 3.5
