"""A notebook in a real kernel: it is executed, and its outputs are looked at."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog"]
TINY: dict[str, Any] = {
    "base": "quickstart",
    "name": "tiny",
    "data": {"sources": ["corpus.jsonl"], "tokenizer": {"vocab_size": 300}},
    "model": {"preset": None, "dim": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "ffn_dim": 64},
    "train": {"steps": 60, "sequence_length": 32, "global_batch": 4, "precision": "fp32", "device": "cpu"},
    "optimizer": {"name": "adamw", "learning_rate": 0.003},
    "schedule.warmup": "5 steps",
    "checkpoint.every": "20 steps",
    "evaluation.every": "20 steps",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    texts = [" ".join(WORDS[(row * 7 + at * at) % len(WORDS)] for at in range(40)) for row in range(200)]
    (tmp_path / "corpus.jsonl").write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))
    return tmp_path


README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
#: The five lines of the README, on a small config.
FIVE_LINES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0].replace(
    '"quickstart", steps=200', "TINY, steps=20"
)
CELLS = [
    "import json, headway\nTINY = json.loads(open('tiny.json').read())",
    "run = headway.train(TINY)",
    "run",
    "run.metrics.plot('train/loss', 'evaluation/loss')",
    FIVE_LINES.replace("TINY,", "TINY, name='five',"),
    "run.metrics.to_pandas()[['train/loss']].tail(1)",
    "headway.train(TINY, stepz=3)",
    "run = headway.train(TINY, name='two', **{'parallel.workers': 2})",
]


def test_a_notebook(folder: Path) -> None:
    """In a kernel: one table in place of lines, a run and its curves as pictures, an error as three lines."""
    nbformat, nbclient = (pytest.importorskip(name) for name in ("nbformat", "nbclient"))
    pytest.importorskip("ipykernel")
    (folder / "tiny.json").write_text(json.dumps(TINY))
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    options = {"kernel_name": "python3", "timeout": 240, "allow_errors": True}
    nbclient.NotebookClient(book, resources={"metadata": {"path": str(folder)}}, **options).execute()
    outputs = [cell.outputs for cell in book.cells]
    for trained in (outputs[1], outputs[7]):
        tables = [one.data["text/html"] for one in trained if one.output_type == "display_data"]
        lines = "".join(one.text for one in trained if one.output_type == "stream")
        assert len(tables) == 1 and "validation loss" in tables[0] and "finished" in tables[0] and "60/60" in tables[0]
        assert tables[0].count("<tr>") == 5, "a head, three evaluations, and the newest step"
        assert "· loss" not in lines and "report: runs/" in lines, "lines of steps"
    shown = outputs[2][0].data
    assert "<svg" in shown["text/html"] and 'href="runs/tiny/report.html"' in shown["text/html"]
    assert shown["text/plain"].startswith("Run('runs/tiny'): state finished")
    assert outputs[3][0].data["text/html"].startswith("<svg")
    assert "steps=20" in book.cells[4].source, "what the README says"
    printed = "".join(one.text for one in outputs[4] if one.output_type == "stream" and one.name == "stdout")
    assert printed.startswith("Run('runs/five'): state finished, step 20 of 20") and len(printed.splitlines()) > 1
    assert "train/loss" in outputs[5][0].data["text/plain"]
    (error,) = outputs[6]
    assert error.output_type == "error" and error.traceback[0] == "error: unknown key 'stepz'"
    assert len(error.traceback) == 3
