"""Two runs on one store, and one on a store with another tokenizer and partly the same text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.runs import config_values, headway, write_corpus


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `runs/a`, `runs/b`, `other/c`, and the text of their stores."""
    folder = tmp_path_factory.mktemp("compared")
    write_corpus(folder, 120)
    lines = (folder / "corpus.jsonl").read_text().splitlines()
    different = [json.dumps({"text": f"{n} " + " ".join(f"w{n * k % 37}" for k in range(60))}) for n in range(60)]
    (folder / "other.jsonl").write_text("\n".join([*lines[:60], *different]) + "\n")
    runs: dict[str, dict[str, Any]] = {
        "a": {"optimizer": {"learning_rate": 1e-2}},
        "b": {"optimizer": {"learning_rate": 2e-2}},
        "c": {"data": {"sources": [str(folder / "other.jsonl")], "store": str(folder / "other-store")}},
    }
    runs["c"]["data"] |= {"tokenizer": {"vocab_size": 290}, "validation": 0.03}
    for name, sections in runs.items():
        values = config_values(folder, train={"steps": 8}, evaluation={"rows": 8, "every": "4 steps"}, **sections)
        values |= {"name": name, "runs": str(folder / ("other" if name == "c" else "runs"))}
        config = folder / f"{name}.yaml"
        config.write_text(yaml.safe_dump(values))
        done = headway("train", config)
        assert done.returncode == 0, done.stderr
    return folder
