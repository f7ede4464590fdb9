"""The card of a model says what its run did, and nothing about the machine or its credentials."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from headway.telemetry.model_card import model_card
from headway.telemetry.record import open_run


def _run(folder: Path, base: str) -> Path:
    run = folder / "my-run"
    run.mkdir()
    sources = [
        {"name": "books", "path": "/home/somebody/private/books.jsonl"},
        {"name": None, "path": "https://user:secret-word@example.org/a.jsonl"},
        {"name": "web", "path": "hf://datasets/org/web"},
    ]
    config = {
        "name": "my-run",
        "seed": 3,
        "data": {"sources": sources},
        "model": {"from_pretrained": base, "adapter": {"method": "lora"}},
        "train": {"steps": 4, "sequence_length": 32, "global_batch": 8},
        "optimizer": {"name": "adamw", "learning_rate": 0.01},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (run / "run.json").write_text(json.dumps({"model": {"parameters": 30_000}}))
    records = [
        {"attempt": 1, "step": step, "train/loss": 5.0 - step, **({"evaluation/loss": 6.5 - step} if step % 2 else {})}
        for step in (1, 2, 3, 4)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


def test_the_card_has_data_steps_losses_and_base(tmp_path: Path) -> None:
    card = model_card(open_run(_run(tmp_path, "hf://org/base@0123")), "me/model", 2, is_adapter=True)
    _, header, text = card.split("---\n", 2)
    assert yaml.safe_load(header) == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["headway"],
        "base_model": "org/base",
    }
    cells = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ") and line != "| | |"]
    rows = {title.strip(): value.strip() for title, value in cells}
    assert rows["steps"] == "2" and rows["tokens"] == "512" and rows["parameters"] == "30.0k"
    assert rows["training loss"] == "3.0000" and rows["validation loss"] == "5.5000"
    assert rows["data"] == "books, https://***@example.org/a.jsonl, web (hf://datasets/org/web)"
    assert "secret-word" not in card and "/home" not in card and "# model" in card and "org/base@0123" in card


def test_a_local_base_is_named_without_its_place(tmp_path: Path) -> None:
    card = model_card(open_run(_run(tmp_path, "/home/somebody/base")), "me/model")
    assert "/home" not in card and "`base`" in card and "base_model" not in card
