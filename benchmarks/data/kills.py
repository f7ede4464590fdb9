"""Kill `headway data prepare` at random moments, again and again, and compare what comes out with an undisturbed store.

Each trial starts from the same place, SIGKILLs the whole process group some times in a row, every time at a moment
chosen evenly over the time that an undisturbed preparation takes, then lets the same command come to its end. All files
of the store but `.work/` must equal those that one undisturbed worker has made, byte for byte; nothing may be left
beside it; and shards and surveys that were finished before a kill must be the very files (inodes) that are in the store
in the end.

    python benchmarks/data/kills.py --kills 200 --seed 0 --output kills.json
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORKERS = (1, 2, 4)
_LIMIT = 600.0


@dataclass(frozen=True)
class Case:
    """One config."""

    name: str
    data: dict[str, Any]
    update: bool = False
    """There is a store already when a trial begins, made from an earlier state of the sources."""


@dataclass
class Tally:
    """What the trials of one case and one number of workers showed."""

    seconds: float
    """Of the undisturbed preparation."""
    trials: int = 0
    kills: int = 0
    too_late: int = 0
    """Preparations that were done before their kill."""
    differences: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    finished: int = 0
    """Shards and surveys that were finished when a preparation was killed, and are in the store."""
    redone: int = 0
    """Those of them that were made again nevertheless."""
    input_bytes: int = 0
    """Input of the last preparations of all trials, ..."""
    processed_bytes: int = 0
    """... and what of it they had to process."""


def write_sources(folder: Path, size: int) -> None:
    """Real texts (Python sources) of about `size` bytes as JSON Lines, Parquet, compressed CSV and text files, a tenth
    of them twice and a tenth of them nearly twice; and a second state of the same folder, in which some have changed.
    """
    texts = _texts(size)
    repeated = texts + texts[::10] + [text.replace("self", "this", 1) for text in texts[5::10]]
    random.Random(1).shuffle(repeated)
    parts = [repeated[start::4] for start in range(4)]
    for name in ("before", "after"):
        place = folder / name
        (place / "texts").mkdir(parents=True)
        changed = name == "after"
        lines = parts[0] if changed else parts[0][: len(parts[0]) * 2 // 3]
        with (place / "lines.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in lines)
        for number, text in enumerate(parts[1]):
            if changed or number % 7:  # new files between the old ones
                (place / "texts" / f"{number:05d}.txt").write_text(text, "utf-8")
        _write_parquet(place / "table.parquet", parts[2] if changed else parts[2][1:])
        _write_csv(place / "table.csv.gz", parts[3])


def _texts(size: int) -> list[str]:
    """Different texts from the standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.relative_to(root).parts)
    random.Random(0).shuffle(paths)
    texts: dict[str, None] = {}
    for path in paths:
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if 200 < len(text) < 60_000:
            texts[text] = None
            size -= len(text)
        if size <= 0:
            break
    return list(texts)


def _write_parquet(path: Path, texts: Sequence[str]) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": list(texts)})
    pyarrow.parquet.write_table(table, path, row_group_size=50)


def _write_csv(path: Path, texts: Sequence[str]) -> None:
    lines = io.StringIO()
    writer = csv.writer(lines)
    writer.writerow(["number", "text"])
    writer.writerows(enumerate(texts))
    path.write_bytes(gzip.compress(lines.getvalue().encode(), mtime=0))


def cases(folder: Path) -> list[Case]:
    """Several sources and formats; then with cleaning, with the search for duplicates, with both, and with a store that
    is brought up to date."""

    def data(**more: Any) -> dict[str, Any]:
        names = ("lines.jsonl", "texts", "table.parquet", "table.csv.gz")
        sources = [
            {"path": str(folder / "now" / name), "name": name.split(".")[0] + str(i)} for i, name in enumerate(names)
        ]
        vocabulary = {"vocab_size": 1000, "training_bytes": 1_000_000}
        return {"sources": sources, "tokenizer": vocabulary, "shard_bytes": 300_000, **more}

    clean = ["unicode", {"step": "length", "min_words": 60}, "pii"]
    every = {"documents": True, "paragraphs": True, "near": True, "max_removed": 0.9, "max_removed_per_source": 1.0}
    return [
        Case("plain", data()),
        Case("clean", data(clean=clean)),
        Case("dedup", data(dedup=every)),
        Case("clean-dedup", data(clean=clean, dedup=every)),
        Case("update", data(), update=True),
        Case("update-dedup", data(dedup=every), update=True),
    ]


class Place:
    """One config with its store, in a folder of its own."""

    def __init__(self, folder: Path, data: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.store = folder, folder / "store"
        self._config = folder / "run.yaml"
        self.set(data)

    def set(self, data: dict[str, Any]) -> None:
        """From now on prepare this."""
        self._data = data
        config = {"name": "kills", "data": {**data, "store": str(self.store)}, "train": {"steps": 1}}
        self._config.write_text(json.dumps(config))  # JSON is YAML

    def start(self, workers: int) -> subprocess.Popen[str]:
        """`headway data prepare` in a process group of its own."""
        command = [sys.executable, "-m", "headway", "data", "prepare", str(self._config), "--json"]
        command += ["--workers", str(workers)]
        with (self.folder / "log").open("w") as log:
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)

    def finish(self, workers: int) -> dict[str, Any]:
        """Let it come to its end; its report."""
        process = self.start(workers)
        output, _ = process.communicate(timeout=_LIMIT)
        if process.returncode:
            raise SystemExit(f"preparation failed: {(self.folder / 'log').read_text()}")
        return dict(json.loads(output))

    def kill(self, workers: int, after: float) -> bool:
        """Start it, and kill it after some seconds; whether it was still running."""
        process = self.start(workers)
        with suppress(subprocess.TimeoutExpired):
            process.wait(after)
        running = process.poll() is None
        if running:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return running

    def contents(self) -> dict[str, str]:
        """Every file of the store but `.work/`, with its SHA-256."""
        files = (path for path in self.store.rglob("*") if path.is_file())
        names = {path.relative_to(self.store).as_posix(): path for path in files}
        return {
            name: hashlib.sha256(path.read_bytes()).hexdigest()
            for name, path in sorted(names.items())
            if not name.startswith(".work/")
        }

    def leftovers(self) -> list[str]:
        """What is beside the store and should not be."""
        return sorted(path.name for path in self.folder.iterdir() if path.name not in ("store", "run.yaml", "log"))

    def finished(self) -> dict[str, int]:
        """What is done in the store in the making: shards that are recorded, and their inodes; and surveys, where they
        come before the shards and not with them."""
        making = self.folder / ".store.preparing"
        done = {path.name.split(".")[0] for path in (making / ".work").glob("*.shards.json")}
        files = [path for path in making.glob("*/*/*.bin") if path.name.split(".")[0] in done]
        if self._data.get("dedup"):
            files += (making / ".work").glob("*.survey.json")
        return {path.relative_to(making).as_posix(): path.stat().st_ino for path in files}


def trial(case: Case, place: Place, prepared: Path | None, workers: int, tally: Tally, kills: Sequence[float]) -> None:
    """Some kills, then the end, and a look at it.

    Args:
        case: What to prepare.
        place: Where; made empty first.
        prepared: A store that is there already.
        workers: Of all preparations.
        tally: Where it is counted.
        kills: The kills' moments in seconds after the start.
    """
    shutil.rmtree(place.folder)
    place.folder.mkdir()
    if prepared is not None:
        shutil.copytree(prepared, place.store, copy_function=shutil.copy2)
    place.set(case.data)
    finished: dict[str, int] = {}
    for after in kills:
        if place.kill(workers, after):
            tally.kills += 1
            finished = place.finished()
        else:
            tally.too_late += 1
            finished = {}
    report = place.finish(workers)
    tally.trials += 1
    tally.input_bytes += report["input_bytes"]
    tally.processed_bytes += report["processed_bytes"]
    for name, inode in finished.items():
        path = place.store / name
        if path.exists():  # else it belonged to a split that was settled otherwise
            tally.finished += 1
            tally.redone += path.stat().st_ino != inode


def compare(reference: dict[str, str], found: dict[str, str], where: str) -> list[str]:
    """Files that differ, are missing, or should not be there."""
    names = sorted(reference.keys() | found.keys())
    return [f"{where}: {name}" for name in names if reference.get(name) != found.get(name)]


def study(case: Case, folder: Path, kills: int, generator: random.Random) -> dict[int, Tally]:
    """All trials of a case, by number of workers."""
    sources = folder / "sources"
    _show(sources, "before" if case.update else "after")
    whole = Place(folder / case.name / "whole", case.data)
    whole.finish(1)
    prepared = None
    if case.update:
        prepared = folder / case.name / "before"
        shutil.copytree(whole.store, prepared)
        _show(sources, "after")
        whole.finish(1)
    reference = whole.contents()
    tallies = {}
    for number, workers in enumerate(WORKERS):
        place = Place(folder / case.name / f"workers-{workers}", case.data)
        tally = Tally(_undisturbed_seconds(case, place, prepared, workers))
        tallies[workers] = tally
        tally.differences += compare(reference, place.contents(), "undisturbed")
        share = kills // len(WORKERS) + (number < kills % len(WORKERS))
        while tally.kills < share:
            planned = min(generator.randint(1, 4), share - tally.kills)
            moments = [generator.uniform(0.0, tally.seconds) for _ in range(planned)]
            trial(case, place, prepared, workers, tally, moments)
            where = f"trial {tally.trials}, kills after {', '.join(f'{moment:.3f}' for moment in moments)} s"
            tally.differences += compare(reference, place.contents(), where)
            tally.leftovers += [f"{where}: {name}" for name in place.leftovers()]
        print(f"{case.name:14}{workers:3} workers: {line(tally)}", flush=True)
    return tallies


def _show(sources: Path, state: str) -> None:
    """Let the configs' sources be in one of their two states."""
    (sources / "now").unlink(missing_ok=True)
    (sources / "now").symlink_to(state)


def _undisturbed_seconds(case: Case, place: Place, prepared: Path | None, workers: int) -> float:
    """How long it takes without kills: the better of two."""
    times = []
    for _ in range(2):
        started = time.perf_counter()
        trial(case, place, prepared, workers, Tally(0.0), [])
        times.append(time.perf_counter() - started)
    return min(times)


def line(tally: Tally) -> str:
    """A tally for people."""
    redone = tally.processed_bytes / max(1, tally.input_bytes)
    return (
        f"{tally.seconds:5.1f} s undisturbed, {tally.kills:3} kills ({tally.too_late} came too late) in "
        f"{tally.trials:3} trials: {len(tally.differences)} differences, {len(tally.leftovers)} leftovers, "
        f"{tally.redone} of {tally.finished} finished results made again, last runs processed {redone:.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bytes", type=int, default=6_000_000, help="text before it is repeated")
    parser.add_argument("--only", help="names of cases, separated by commas")
    parser.add_argument("--folder", type=Path, help="where to work; kept (default: a temporary one)")
    parser.add_argument("--output", type=Path, help="JSON with all results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headway-kills-") as temporary:
        folder = args.folder or Path(temporary)
        write_sources(folder / "sources", args.bytes)
        known = {case.name: case for case in cases(folder / "sources")}
        names = args.only.split(",") if args.only else list(known)
        if unknown := [name for name in names if name not in known]:
            parser.error(f"--only: there is no case {', '.join(unknown)}; there are {', '.join(known)}")
        chosen = [known[name] for name in names]
        generator = random.Random(args.seed)
        results = {}
        for number, case in enumerate(chosen):
            share = args.kills // len(chosen) + (number < args.kills % len(chosen))
            results[case.name] = study(case, folder, share, generator)
    tallies = [tally for by_workers in results.values() for tally in by_workers.values()]
    differences = [found for tally in tallies for found in (*tally.differences, *tally.leftovers)]
    kills, redone = sum(tally.kills for tally in tallies), sum(tally.redone for tally in tallies)
    finished = sum(tally.finished for tally in tallies)
    print(f"{kills} kills: {len(differences)} differences; {redone} of {finished} finished results made again")
    for found in differences[:50]:
        print(f"  {found}")
    if args.output:
        report = {
            "seed": args.seed,
            "kills": kills,
            "differences": differences,
            "finished_results": finished,
            "redone_results": redone,
            "cases": {name: {n: vars(tally) for n, tally in found.items()} for name, found in results.items()},
        }
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(bool(differences or redone))


if __name__ == "__main__":
    main()
