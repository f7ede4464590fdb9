"""Preparation that is killed, or runs out of disk."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from headway.core.process.waiting import wait_until
from support.runs import store_contents
from support.waits import LONG

# PIECE_BYTES is lowered so that a small corpus has many pieces; spawned workers read what the parent cut.
SCRIPT = """
import sys
from headway.config.schema import DataConfig
from headway.core.errors import HeadwayError
from headway.text.preparing import building
from headway.text.reading import sources
from headway.text.preparing.prepare import prepare

sources.PIECE_BYTES = 3000
if "by two renames" in sys.argv:
    building.exchange = lambda one, other: False
if __name__ == "__main__":
    data = DataConfig.model_validate(
        {"sources": "corpus.jsonl", "store": "store", "shard_bytes": 3000, "tokenizer": {"vocab_size": 300}}
    )
    try:
        prepare(data, workers=int(sys.argv[1]))
    except HeadwayError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(error.exit_code)
"""


def write_corpus(folder: Path, word: str) -> None:
    lines = [json.dumps({"text": f"document {i} is about {word} " * 8}) for i in range(150)]
    (folder / "corpus.jsonl").write_text("\n".join(lines))


def prepare(
    folder: Path, faults: str = "", workers: int = 2, before: Callable[[], None] | None = None, how: str = ""
) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, "script.py", str(workers), how],
        cwd=folder,
        env={**os.environ, "HEADWAY_FAULTS": faults},
        text=True,
        capture_output=True,
        timeout=LONG,
        preexec_fn=before,
    )


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The store that an undisturbed preparation makes."""
    folder = tmp_path_factory.mktemp("reference")
    write_corpus(folder, "rivers")
    assert prepare(folder).returncode == 0
    return store_contents(folder / "store")


@pytest.mark.parametrize(
    ("existing", "point"),
    [
        *((False, point) for point in ("data.shard:2", "data.piece:5", "data.unit", "data.publish", "data.published")),
        # Before a store is published it does not matter whether there is another one.
        *((True, point) for point in ("data.publish", "data.published")),
        *(pytest.param(True, point, marks=pytest.mark.slow) for point in ("data.shard:2", "data.piece:5", "data.unit")),
    ],
)
def test_killed_preparation_is_made_good_by_the_same_command(
    tmp_path: Path, reference: dict[str, bytes], point: str, existing: bool
) -> None:
    if existing:
        write_corpus(tmp_path, "mountains")
        assert prepare(tmp_path).returncode == 0
    before = store_contents(tmp_path / "store")
    write_corpus(tmp_path, "rivers")
    assert prepare(tmp_path, f"kill@{point}").returncode == -signal.SIGKILL
    if point == "data.published":
        # Everything is done but clearing away what was there before.
        assert store_contents(tmp_path / "store") == reference
        assert hidden(tmp_path) in ([[".store.preparing"], [".store.replaced"]] if existing else [[]])
    else:
        assert ".store.preparing" in hidden(tmp_path)
        assert store_contents(tmp_path / "store") == before
    assert prepare(tmp_path).returncode == 0
    assert store_contents(tmp_path / "store") == reference
    assert hidden(tmp_path) == []


def test_a_store_that_stepped_aside_is_put_back_before_anything_can_fail(tmp_path: Path) -> None:
    """Where folders cannot be exchanged."""
    write_corpus(tmp_path, "mountains")
    assert prepare(tmp_path).returncode == 0
    before = store_contents(tmp_path / "store")
    write_corpus(tmp_path, "rivers")
    assert prepare(tmp_path, "kill@data.aside", how="by two renames").returncode == -signal.SIGKILL
    assert not (tmp_path / "store").exists()
    with (tmp_path / "corpus.jsonl").open("a") as file:
        file.write("\nbroken")
    assert prepare(tmp_path).returncode == 3
    assert store_contents(tmp_path / "store") == before


def test_workers_do_not_outlive_a_killed_parent(tmp_path: Path, reference: dict[str, bytes]) -> None:
    write_corpus(tmp_path, "rivers")
    prepare(tmp_path, "kill@data.piece:5")

    def alive() -> list[psutil.Process]:
        return [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path)]

    assert wait_until(lambda: not alive(), LONG, 0.1), f"still there: {alive()}"


@pytest.mark.parametrize("kind", ["ordered", "limit"])
@pytest.mark.parametrize("existing", [False, True])
def test_full_disk_is_said_and_harms_nothing(tmp_path: Path, kind: str, existing: bool) -> None:
    if existing:
        write_corpus(tmp_path, "mountains")
        assert prepare(tmp_path).returncode == 0
    before = store_contents(tmp_path / "store")
    write_corpus(tmp_path, "rivers")

    def limit_file_size() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    if kind == "ordered":
        result = prepare(tmp_path, "enospc@data.shard:2")
    else:
        result = prepare(tmp_path, before=limit_file_size)
    assert result.returncode == 3, result.stderr
    assert "the token store cannot be written" in result.stderr
    assert "where: store" in result.stderr
    assert ("data.store" if kind == "ordered" else "ulimit -f") in result.stderr
    assert store_contents(tmp_path / "store") == before
    assert hidden(tmp_path) == []
