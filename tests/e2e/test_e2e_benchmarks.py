"""lm-eval beside a training and by hand: the same numbers as its own on the export, and nothing asks the network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from headway.telemetry.metrics import read_metrics
from support.runs import headway
from support.waits import LONG

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed: pip install '.[lm-eval]'"),
]

#: Every process refuses to look a name up or to connect, and says so in a file.
NO_NETWORK = """
import os, socket

def refuse(*arguments, **options):
    with open(os.environ["NETWORK_LOG"], "a") as log:
        log.write(f"{arguments}\\n")
    raise OSError("there is no network")

socket.getaddrinfo = socket.socket.connect = refuse
"""

TASK = """
task: even_numbers
dataset_path: json
dataset_kwargs: {{data_files: {{test: {questions}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: [" yes", " no"]
doc_to_target: "{{{{answer}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""

REPORT: dict[str, Any] = {"telemetry": {"report": True}}

BY_HAND = """
import json, sys
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

model = HFLM(pretrained=sys.argv[1], device="cpu", batch_size=8, dtype="float32")
manager = TaskManager(include_path=sys.argv[2], include_defaults=False)
found = simple_evaluate(model=model, tasks=["even_numbers"], task_manager=manager, bootstrap_iters=0)
numbers = found["results"]["even_numbers"]
print(json.dumps({"acc": numbers["acc,none"], "acc_norm": numbers["acc_norm,none"]}))
"""


def test_numbers_are_those_of_lm_eval_on_the_export(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions, guard, log = tmp_path / "questions.jsonl", tmp_path / "guard", tmp_path / "network.log"
    lines = [{"question": f"Is {number} even?", "answer": number % 2} for number in range(40)]
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "even.yaml").write_text(TASK.format(questions=questions))
    guard.mkdir()
    (guard / "sitecustomize.py").write_text(NO_NETWORK)
    monkeypatch.setenv("PYTHONPATH", f"{guard}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("NETWORK_LOG", str(log))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    task = str(tmp_path / "tasks" / "even.yaml")
    benchmarks = {"tasks": [task], "every": "2 steps", "device": "cpu"}
    config = tiny(train={"steps": 6}, checkpoint={"every": "2 steps"}, evaluation={"benchmarks": benchmarks}, **REPORT)
    done = headway("train", config, fresh=True)
    assert done.returncode == 0, done.stderr
    run = next((tmp_path / "runs").iterdir())
    results: dict[str, Any] = json.loads((run / "benchmarks" / "step-00000006.json").read_text())
    assert not log.exists(), log.read_text()

    assert headway("export", run).returncode == 0
    words = [sys.executable, "-c", BY_HAND, str(run / "export"), str(tmp_path / "tasks")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    by_hand = subprocess.run(
        words, env={**os.environ, **offline}, capture_output=True, text=True, timeout=LONG, check=False
    )
    assert by_hand.returncode == 0, by_hand.stderr
    assert results["results"]["even_numbers"] == json.loads(by_hand.stdout.splitlines()[-1])

    for name, value in results["results"]["even_numbers"].items():
        assert read_metrics(run).last(f"evaluation/benchmarks/even_numbers {name}") == value
    assert read_metrics(run).last("evaluation/benchmarks_step") == 6.0
    assert "even_numbers" in (run / "report.html").read_text()
    asked = headway("benchmark", run / "export", "--tasks", task, "--json", fresh=True)
    assert asked.returncode == 0 and json.loads(asked.stdout)["results"] == results["results"], asked.stderr
    assert not log.exists(), log.read_text()
