"""Documents packed whole and kept apart, from text to a resumed run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from headway.data.store import TokenStore
from support.runs import WORDS, config_values, headway, state_hash

PACKED = {"packing": "best_fit", "document_mask": True}


@pytest.fixture
def packed(tmp_path: Path) -> Callable[..., Path]:
    """Short documents of several lengths, some longer than a row."""
    with (tmp_path / "corpus.jsonl").open("w", encoding="utf-8") as file:
        for number in range(80):
            words = [WORDS[(number + 3 * place) % len(WORDS)] for place in range(3 + number % 37)]
            file.write(json.dumps({"text": f"{number}: " + " ".join(words)}) + "\n")

    def make(name: str, **train: object) -> Path:
        values = config_values(tmp_path, name=name, train={"steps": 6, "micro_batch": 2, **train})
        values["data"] |= PACKED
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(values), "utf-8")
        return tmp_path / f"{name}.yaml"

    assert headway("data", "prepare", make("prepare")).returncode == 0
    return make


@pytest.mark.slow
def test_a_packed_run_resumes_to_the_same_bits(packed: Callable[..., Path], tmp_path: Path) -> None:
    straight = headway("train", packed("straight"))
    assert straight.returncode == 0, straight.stderr
    assert straight.stderr.count("packing best_fit: corpus ") == 1
    killed = headway("train", packed("killed"), faults="kill@step=4")
    assert killed.returncode != 0
    assert headway("train", packed("killed")).returncode == 0
    assert state_hash(tmp_path / "runs" / "killed") == state_hash(tmp_path / "runs" / "straight")

    records = [json.loads(line) for line in (tmp_path / "runs/straight/metrics.jsonl").read_text().splitlines()]
    items = [record["train/items"] for record in records if "train/items" in record]
    assert len(items) == 6 and all(items_of_step < 8 * 32 for items_of_step in items), "padding is no work"

    # Every target inside a document, and no other, is evaluated.
    store = TokenStore.open(tmp_path / "store")
    targets = store.tokens("validation") - (len(store.documents("validation", "corpus")) - 1)
    evaluated = json.loads(headway("eval", tmp_path / "runs" / "straight", "--json").stdout)
    assert evaluated["tokens"] == targets
