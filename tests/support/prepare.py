"""What tests of `headway data prepare --on` share: a corpus that tells which of its units were done, and how often."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

#: Notes who cleans which document, and takes its time, so that a kill finds work under way.
_STEP = """
import os, time

def note(text):
    file = os.open(os.environ["NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{os.getpid()} {text.split()[0]}\\n".encode())
    os.close(file)
    time.sleep(float(os.environ["PAUSE"]))
    return True
"""
FILES = 8


class Corpus:
    """Files of different length, each of which is one unit; some of their documents and paragraphs are equal.

    Args:
        folder: Where it is made, with the config.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, draw = folder, random.Random(0)
        words = [f"word{number}" for number in range(500)]
        (folder / "noting.py").write_text(_STEP)
        shared = [" ".join(draw.choices(words, k=30)) for _ in range(6)]
        for number in range(FILES):
            own = [f"{number}/{n} {' '.join(draw.choices(words, k=40))}\n\n{shared[n % 6]}" for n in range(10 + number)]
            texts = [*own, *(f"equal/{n} {text}" for n, text in enumerate(shared))]
            (folder / f"part{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        self.config = folder / "config.yaml"
        dedup = {"documents": True, "near": True, "paragraphs": True, "max_removed": 0.9, "max_removed_per_source": 1.0}
        data: dict[str, Any] = {
            "sources": ["part*.jsonl"], "store": "many", "shard_bytes": 1000, "tokenizer": {"vocab_size": 300},
            "clean": [{"step": "python", "function": "noting:note"}], "dedup": {**dedup, "paragraph_bytes": 20},
        }  # fmt: skip
        self.config.write_text(json.dumps({"data": data}))

    def prepare(self, *words: str, pause: float = 0.0, **environment: str) -> subprocess.Popen[str]:
        """Start `headway data prepare`; its store is `many`."""
        command = [sys.executable, "-m", "headway", "data", "prepare", self.config.name, *words]
        variables = {**os.environ, "NOTES": str(self.folder / "notes"), "PAUSE": str(pause), **environment}
        with (self.folder / "prepare.log").open("w") as log:
            return subprocess.Popen(command, cwd=self.folder, env=variables, stdout=log, stderr=log, text=True)

    def log(self) -> str:
        """What the last preparation has printed."""
        return (self.folder / "prepare.log").read_text()

    def prepare_alone(self) -> None:
        """Prepare the same store, `one`, on this machine."""
        alone = self.prepare("data.store=one", "--workers", "1", NOTES=str(self.folder / "notes-one"))
        assert alone.wait(300) == 0, self.log()

    def surveyed(self) -> set[int]:
        """The files whose units have been recorded, by their length."""
        found = set()
        for path in (self.folder / ".many.preparing" / ".work").glob("*.survey.json"):
            found.add(json.loads(path.read_text())["read"] - 16)
        return found

    def workers(self) -> list[int]:
        """Processes that have cleaned a document, the last one last."""
        return [int(process) for process, _ in self._notes("notes")]

    def times(self, name: str = "notes") -> dict[int, Counter[str]]:
        """By file, how often each of its own documents was cleaned."""
        found: dict[int, Counter[str]] = {number: Counter() for number in range(FILES)}
        for _, document in self._notes(name):
            if not document.startswith("equal"):
                found[int(document.partition("/")[0])][document] += 1
        return found

    def _notes(self, name: str) -> list[list[str]]:
        path = self.folder / name
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []
