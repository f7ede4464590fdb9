"""Reading batches of 8 rows of 1,024 tokens: Headway's feed beside nanoGPT's sampling, litdata and MosaicML Streaming.

All read the same tokens (the source text of Python's standard library) from a warm page cache and give inputs and
targets as int64 tensors, in one process without workers. Headway and nanoGPT take turns; the others run as processes of
their own between two such rounds. litdata and mosaicml-streaming pin other packages, so they are best installed into an
environment of their own that also has torch and numpy, named by `--peers-python`; what is missing is n/a.

    python benchmarks/data/feed.py
    python benchmarks/data/feed.py --peers-python /path/to/venv/bin/python --output feed.json

It also opens a simulated store of 1e12 tokens in 10,000 shards (sparse files), and reads its first and a late batch.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headway.config import Config, LaneGrid, resolve
from headway.data.feeding.token_feed import TokenFeed
from headway.data.store import TokenStore
from headway.text.preparing.prepare import prepare

BATCH, LENGTH = 8, 1024
GRID = LaneGrid(lanes=1, micro_batches=1, micro_batch=BATCH)
PEERS = ("litdata", "mosaicml")


def config_of(store: Path, **data: Any) -> Config:
    """As many steps as anyone asks for."""
    values = {"sources": ["stdlib:"], "store": str(store), "validation": 0.0, "bad_documents": "skip", **data}
    train = {"steps": 10**9, "sequence_length": LENGTH, "global_batch": BATCH}
    return resolve(Config.model_validate({"data": values, "train": train}))


def nanogpt(tokens: Path) -> Callable[[], Any]:
    """`get_batch` as nanoGPT's train.py has it (commit 3adf61e), for data on the CPU."""

    def get_batch() -> Any:
        # "We recreate np.memmap every batch to avoid a memory leak"
        data = np.memmap(tokens, dtype=np.uint16, mode="r")
        ix = torch.randint(len(data) - LENGTH, (BATCH,))
        x = torch.stack([torch.from_numpy((data[i : i + LENGTH]).astype(np.int64)) for i in ix])
        y = torch.stack([torch.from_numpy((data[i + 1 : i + 1 + LENGTH]).astype(np.int64)) for i in ix])
        return x, y

    return get_batch


def headway(config: Config) -> Callable[[], Any]:
    """Opens the store and gives one step after the other."""
    feed = TokenFeed.of(config.row_settings, GRID, TokenStore.open(config.data.store))
    step = iter(range(config.train.steps or 0))
    return lambda: feed.batch(next(step), 0)


def timed(work: Callable[[], Any], times: int = 1, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds."""
    start = clock()
    for _ in range(times):
        work()
    return clock() - start


def peer(python: Path, name: str, tokens: Path, folder: Path, batches: int, rounds: int) -> dict[str, Any] | None:
    """What a peer measured in a process of its own; None when it is not installed."""
    module = {"litdata": "litdata", "mosaicml": "streaming"}[name]
    looked = subprocess.run([python, "-c", f"import {module}"], capture_output=True, text=True, check=False)
    if looked.returncode:
        print(f"{name} does not run: {looked.stderr.strip().splitlines()[-1:]}")
        return None
    script = Path(__file__).parent / "peers" / "feed_streams.py"
    command = [python, script, name, tokens, folder / name, str(batches), str(rounds)]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{name} failed:\n{result.stderr[-2000:]}")
    return dict(json.loads(result.stdout.strip().splitlines()[-1]))


def simulated_store(real: TokenStore, folder: Path, tokens: int, shards: int) -> Path:
    """A store that claims many tokens; its shards are sparse files."""
    manifest = json.loads(json.dumps(real.manifest))
    (name,) = real.sources("train")
    part, each = manifest["splits"]["train"][name], tokens // shards
    model = part["shards"][0]
    part["shards"] = [{**model, "file": f"{number:05d}.bin", "tokens": each} for number in range(shards)]
    part["tokens"], part["documents"] = each * shards, model["documents"] * shards
    for source in manifest["sources"]:
        source.update(tokens=part["tokens"], documents=part["documents"])
    target = folder / "train" / name
    target.mkdir(parents=True)
    width = np.dtype(manifest["dtype"]).itemsize
    for shard in part["shards"]:
        with (target / shard["file"]).open("wb") as file:
            file.truncate(each * width)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def simulate(real: TokenStore, folder: Path, rounds: int) -> dict[str, float]:
    """Processor time from opening a store of 1e12 tokens to a batch, in seconds, and the part of it that goes into
    seeing that every shard is there in its full length. The best of some rounds."""
    path, late = simulated_store(real, folder, 10**12, 10_000), 10**12 // (BATCH * LENGTH) - 7
    mixture = {"temperature": 2, "stages": [{"start": 0.5, "change": "linear"}, {"start": 0.9, "sequence_length": 512}]}
    cases = {
        "first_batch_seconds": (config_of(path), 0),
        "late_batch_seconds": (config_of(path), late),
        "late_batch_of_a_mixture_seconds": (config_of(path, mixture=mixture), late),
    }

    def batch(config: Config, step: int) -> Callable[[], Any]:
        return lambda: TokenFeed.of(config.row_settings, GRID, TokenStore.open(path)).batch(step, 0)

    def best(work: Callable[[], Any]) -> float:
        return min(timed(work, clock=time.process_time) for _ in range(rounds))

    seconds = {name: best(batch(*case)) for name, case in cases.items()}
    return {**seconds, "look_at_every_shard_seconds": best(TokenStore.open(path, check=False).check)}


def measure(folder: Path, peers_python: Path, batches: int, rounds: int) -> dict[str, Any]:
    """All figures."""
    config = config_of(folder / "store")
    prepare(config.data)
    store = TokenStore.open(config.data.store)
    tokens = folder / "train.bin"
    (source,) = store.sources("train")
    store.read("train", source, 0, store.tokens("train", source)).astype("<u2").tofile(tokens)
    openers = {"headway": lambda: headway(config), "nanogpt": lambda: nanogpt(tokens)}
    first = {name: min(timed(lambda o=o: o()()) for _ in range(rounds)) for name, o in openers.items()}  # type: ignore[misc]
    readers, seconds = {name: opener() for name, opener in openers.items()}, {name: [] for name in openers}
    peers: dict[str, Any] = {}
    for number in range(rounds):
        if number == rounds // 2:
            peers = {name: peer(peers_python, name, tokens, folder, batches, rounds) for name in PEERS}
        for name, read in readers.items():
            seconds[name].append(timed(read, batches))
    best = {name: min(values) / batches for name, values in seconds.items()}
    best |= {name: min(found["round_seconds"]) / batches if found else None for name, found in peers.items()}
    first |= {name: found["first_batch_seconds"] if found else None for name, found in peers.items()}
    return {
        "tokens": store.tokens("train"),
        "batch": [BATCH, LENGTH],
        "batches": batches,
        "seconds_per_batch": best,
        "first_batch_seconds": first,
        "ratio_to_headway": {name: value and value / best["headway"] for name, value in best.items()},
        "simulated_1e12_tokens": simulate(store, folder / "simulated", rounds),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": platform.machine(),
    }


def table(result: dict[str, Any]) -> str:
    """For people."""
    lines = [f"{'':12}{'µs per batch':>14}{'against headway':>17}{'first batch, ms':>17}"]
    for name, seconds in result["seconds_per_batch"].items():
        first, ratio = result["first_batch_seconds"][name], result["ratio_to_headway"][name]
        cells = (
            ("n/a", "n/a", "n/a")
            if seconds is None
            else (f"{seconds * 1e6:,.0f}", f"{ratio:.1f} times", f"{first * 1e3:,.1f}")
        )
        lines.append(f"{name:12}{cells[0]:>14}{cells[1]:>17}{cells[2]:>17}")
    lines.append("a store of 1e12 tokens in 10,000 shards (simulated), processor time from opening it to the batch:")
    for name, seconds in result["simulated_1e12_tokens"].items():
        lines.append(f"  {name.removesuffix('_seconds').replace('_', ' '):32}{seconds * 1e3:8.1f} ms")
    return "\n".join(lines)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", type=Path, default=Path(sys.executable))
    parser.add_argument("--batches", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), arguments.peers_python, arguments.batches, arguments.rounds)
    print(table(result))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
