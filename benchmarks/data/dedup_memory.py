"""Memory and time of the search for duplicates among many documents, with simulated prints.

A fifth of each unit's documents are near-duplicates of documents of the unit before. What is sampled is the process's
anonymous memory: mapped prints and scratch files are pages of files, which the kernel takes back when it needs them.

    python benchmarks/data/dedup_memory.py
    python benchmarks/data/dedup_memory.py --documents 3000000 --memory 256 --output dedup_memory.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from headway.config.sections.data import DedupConfig
from headway.text.dedup import DocumentPrints, find_duplicates
from headway.text.dedup.fingerprints import StoredPrints
from headway.text.dedup.minhash import Layout

_UNIT = 20_000
_CONFIG = DedupConfig(near=True, max_cluster=1.0, max_removed=1.0, max_removed_per_source=1.0)


def simulate(count: int, folder: Path) -> list[StoredPrints]:
    """Files of prints of so many documents."""
    layout, draw = Layout.of(_CONFIG), np.random.default_rng(0)
    copied = _UNIT // 5
    stored = []
    before: tuple[Any, Any] | None = None
    for unit in range(-(-count // _UNIT)):
        # A set bit in every four, so that no bin is empty.
        signatures = draw.integers(0, 2**32, (_UNIT, layout.columns), dtype=np.uint32) | np.uint32(0x11111111)
        bands = draw.integers(1, 2**64, (layout.bands, _UNIT), dtype=np.uint64)
        if before:
            signatures[:copied], bands[:, :copied] = before
        before = signatures[-copied:].copy(), bands[:, -copied:].copy()
        prints = DocumentPrints(
            hashes=draw.integers(0, 2**64, (_UNIT, 2), dtype=np.uint64),
            sizes=draw.integers(100, 10_000, _UNIT),
            signatures=signatures,
            bands=bands,
            paragraph_hashes=np.zeros(0, np.uint64),
            paragraph_counts=np.zeros(_UNIT, np.int64),
        )
        prints.save(folder / f"{unit}.prints")
        stored.append(StoredPrints(folder / f"{unit}.prints"))
    return stored


class Sampler:
    """The largest anonymous memory of this process while it is watched, in MiB (Linux only)."""

    def __init__(self) -> None:
        self.peak = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._done.wait(0.01):
            self.peak = max(self.peak, anonymous_mib())

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()


def anonymous_mib() -> float:
    """Anonymous memory of this process now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--memory", type=int, default=64, help="bound on working arrays, in MiB")
    parser.add_argument("--folder", type=Path, help="where prints and scratch files lie (about 740 bytes a document)")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    arguments = parser.parse_args()
    figures = []
    print("| documents | processor seconds | documents per second | anonymous memory before, MiB | at most, MiB |")
    print("|---:|---:|---:|---:|---:|")
    for count in arguments.documents:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
            stored = simulate(count, Path(name))
            before = anonymous_mib()
            with Sampler() as sampler:
                started = time.process_time()
                found = find_duplicates(
                    stored,
                    ["source"] * len(stored),
                    _CONFIG,
                    memory_bytes=arguments.memory * 2**20,
                    scratch=Path(name),
                )
                seconds = time.process_time() - started
        total = found.report["total"]["documents"]
        assert found.report["total"]["near"] == (len(stored) - 1) * (_UNIT // 5)
        print(f"| {total:,} | {seconds:.1f} | {total / seconds:,.0f} | {before:.0f} | {sampler.peak:.0f} |")
        figures.append({"documents": total, "seconds": seconds, "before_mib": before, "peak_mib": sampler.peak})
    if arguments.output:
        arguments.output.write_text(json.dumps({"memory_mib": arguments.memory, "runs": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
