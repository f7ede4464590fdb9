"""Preparation under SIGKILLs at random moments: the same command makes the store that an undisturbed one makes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from support.runs import store_contents
from support.waits import LONG

KILLS = 3
PLAIN: dict[str, Any] = {}
EVERYTHING: dict[str, Any] = {
    "clean": ["unicode", {"step": "length", "min_words": 60}],
    "dedup": {"documents": True, "paragraphs": True, "near": True, "max_removed_per_source": 1.0},
}


def write_sources(folder: Path) -> None:
    """Real texts as lines and as files, some of them in both."""
    library = Path(sysconfig.get_path("stdlib"))
    texts = [path.read_text("utf-8") for path in sorted(library.glob("*.py"))[:120]]
    folder.mkdir()
    (folder / "files").mkdir()
    (folder / "lines.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts[:70]))
    for number, text in enumerate(texts[60:]):
        (folder / "files" / f"{number:03d}.txt").write_text(text)


def write_config(folder: Path, sources: Path, more: dict[str, Any]) -> None:
    data = {
        "sources": [str(sources / "lines.jsonl"), str(sources / "files")],
        "store": str(folder / "store"),
        "shard_bytes": 100_000,
        "tokenizer": {"vocab_size": 400, "training_bytes": 100_000},
        **more,
    }
    folder.mkdir()
    (folder / "run.yaml").write_text(json.dumps({"name": "killed", "data": data, "train": {"steps": 1}}))


def start(folder: Path, workers: int, faults: str = "") -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "headway", "data", "prepare", str(folder / "run.yaml"), "--workers", str(workers)]
    variables = {**os.environ, "HEADWAY_FAULTS": faults}
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=variables, start_new_session=True)


def work_begins(folder: Path, process: subprocess.Popen[bytes]) -> float:
    """Wait for the store in the making: what comes before it leaves no trace. Returns the time."""
    while process.poll() is None and not (folder / ".store.preparing").exists():
        time.sleep(0.002)
    return time.monotonic()


def kill(folder: Path, workers: int, seconds: float) -> bool:
    """SIGKILL the whole process group so long after work has begun, which cannot end before that; whether the store is
    half made."""
    process = start(folder, workers, "hang@data.publish")
    work_begins(folder, process)
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return (folder / ".store.preparing").exists() and not (folder / "store").exists()


def finish(folder: Path, workers: int) -> float:
    """Let it come to its end; how long the work took."""
    process = start(folder, workers)
    began = work_begins(folder, process)
    assert process.wait(LONG) == 0, (folder / "log").read_text()
    return time.monotonic() - began


def finished_shards(folder: Path) -> dict[Path, int]:
    """Shards in the making whose record is there: where they will be in the store, and their inodes."""
    making = folder / ".store.preparing"
    keys = {path.name.removesuffix(".shards.json") for path in making.glob(".work/*.shards.json")}
    shards = [path for path in making.glob("*/*/*.bin") if path.stem in keys]
    return {folder / "store" / path.relative_to(making): path.stat().st_ino for path in shards}


@pytest.mark.parametrize(
    ("workers", "more"), [(1, PLAIN), pytest.param(2, EVERYTHING, marks=pytest.mark.slow)], ids=["plain", "everything"]
)
def test_kills_at_random_moments(tmp_path: Path, workers: int, more: dict[str, Any]) -> None:
    write_sources(tmp_path / "sources")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    write_config(whole, tmp_path / "sources", more)
    write_config(killed, tmp_path / "sources", more)
    seconds = finish(whole, workers)
    generator = random.Random(workers)
    moments = sorted(generator.uniform(0.0, seconds) for _ in range(KILLS))
    assert all(kill(killed, workers, moment) for moment in moments), "no kill must come too late"
    finished = finished_shards(killed)
    finish(killed, workers)
    assert store_contents(killed / "store") == store_contents(whole / "store")
    assert sorted(path.name for path in killed.iterdir()) == ["log", "run.yaml", "store"]
    # What was finished before the last kill is there as it was: the very same files.
    assert {path: path.stat().st_ino for path in finished} == finished
