"""What tests of launchers share: jobs, and programs of clusters that only note how they are called."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.clouds.launchers.job import Job
from headway.config import load_config
from support.parts_table import environment
from support.waits import LONG

VOLUMES = "launch.kubernetes.volumes=[{claim: runs, mount: /runs}, {claim: data, mount: /data, read_only: true}]"
#: A config that every target takes.
COMPLETE = (
    "name=tiny-run", "runs=/runs", "data.store=/data/store", "parallel.workers=8", "launch.image=registry/headway:1",
    VOLUMES,
)  # fmt: skip

#: Notes its arguments and standard input, and answers with what the test has put down for words that it is called with.
_PROGRAM = """#!{python} -S
import json, os, sys
here = os.path.dirname(os.path.abspath(__file__))
words = [os.path.basename(__file__), *sys.argv[1:]]
given = "" if sys.stdin.isatty() else sys.stdin.read()
with open(os.path.join(here, "calls.jsonl"), "a") as file:
    file.write(json.dumps([words, given]) + "\\n")
for answer in json.load(open(os.path.join(here, "answers.json"))):
    if all(word in words for word in answer["words"]):
        sys.stdout.write(answer.get("stdout", ""))
        sys.stderr.write(answer.get("stderr", ""))
        sys.exit(answer.get("code", 0))
"""


def job(*overrides: str, machines: int = 2, **options: Any) -> Job:
    """A job of a preset."""
    return Job(load_config("quickstart", [*COMPLETE, *overrides]), machines, **options)


def documents(files: dict[str, str]) -> list[dict[str, Any]]:
    """All manifests of a launch."""
    texts = (text for name, text in files.items() if name.endswith(".yaml"))
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def read_by_their_models(manifests: list[dict[str, Any]]) -> list[list[str]]:
    """What models that other projects publish say of each manifest."""
    python = environment("schemas")
    if python is None:
        pytest.skip("there are no models: tests/parts/install.sh")
    script = Path(__file__).parents[1] / "parts" / "published_models.py"
    # Without the path of the tests: their packages are not those of the environment.
    done = subprocess.run(
        [python, "-I", script], input=json.dumps(manifests), capture_output=True, text=True, timeout=LONG, check=False
    )
    assert done.returncode == 0, done.stderr
    found: list[list[str]] = json.loads(done.stdout)
    return found


class Programs:
    """Programs on the path that stand for those of a cluster."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.folder, self._answers = folder / "programs", list[dict[str, Any]]()
        self.folder.mkdir()
        for name in names:
            path = self.folder / name
            path.write_text(_PROGRAM.format(python=os.path.realpath("/proc/self/exe")))
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{self.folder}{os.pathsep}{os.environ['PATH']}")
        self._write()

    def answer(self, *words: str, **answer: Any) -> None:
        """Answer calls that have all these words; later answers come first."""
        self._answers.insert(0, {"words": words, **answer})
        self._write()

    def _write(self) -> None:
        (self.folder / "answers.json").write_text(json.dumps(self._answers))

    @property
    def calls(self) -> list[list[str]]:
        """The command lines so far."""
        return [words for words, _ in self._lines()]

    @property
    def given(self) -> str:
        """Everything that was given on standard input."""
        return "".join(given for _, given in self._lines())

    def _lines(self) -> list[Any]:
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
