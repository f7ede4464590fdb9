"""Token stores whose bytes are recorded."""

from __future__ import annotations

import csv
import hashlib
import json
from pathlib import Path
from typing import Any

import yaml

from net.runs import HERE, VALUES, kept_copy
from support.runs import headway, store_contents

RECORDED_STORE = HERE / "golden" / "store.json"


def hashes(store: Path) -> dict[str, str]:
    """Hash every file of a store, without what only preparing and training leave there."""
    contents = store_contents(store)
    return {
        name: hashlib.sha256(content).hexdigest()
        for name, content in sorted(contents.items())
        if not name.startswith(".")
    }


def prepare_rich(folder: Path) -> Path:
    """Prepare texts in several formats, cleaned, without duplicates, in several shards, begun by a special token."""
    kept_copy(folder)
    lines = [json.loads(line)["text"] for line in (folder / "texts" / "counting.jsonl").read_text().splitlines()]
    with (folder / "texts" / "table.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["question", "answer"])
        writer.writerows([text, f"{number} größer 猫 \U0001f600"] for number, text in enumerate(lines[:25]))
    (folder / "texts" / "story.txt").write_text(
        "One line.\n\n\tAnother line with 12,345 signs.\n" * 4, encoding="utf-8"
    )
    data: dict[str, Any] = {
        **VALUES["data"],
        "sources": [
            {"path": "texts/*.jsonl", "name": "lines", "limit": "50 documents"},
            {"path": "texts/table.csv", "template": "Question: {question}\nAnswer: {answer}"},
            {"path": "texts/story.txt"},
        ],
        "store": "rich",
        "tokenizer": {"vocab_size": 400, "pattern": "gpt2"},
        "clean": [{"step": "length", "min_characters": 12}, {"step": "pii"}],
        "dedup": {"documents": True, "near": True, "max_removed": 1, "max_cluster": 1, "max_removed_per_source": 1},
        "shard_bytes": 2000,
        "validation": 0.2,
    }
    (folder / "rich.yaml").write_text(yaml.safe_dump({**VALUES, "name": "rich", "data": data}), encoding="utf-8")
    done = headway("data", "prepare", "rich.yaml", cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "rich"
