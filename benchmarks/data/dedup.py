"""Deduplication beside datatrove's: documents per second on one core, and recall and precision on planted copies.

Documents are real: readme files, licences, docstrings and sources of the installed packages and the standard library,
in pieces of 30 to 2,000 words, a third of them edited copies of others (`planted.py`). Both sides see the same texts,
take turns, and are timed inside their own process, reading and imports not counted. Both run with their own defaults:
datatrove's 14 bands of 8 rows take what they find for similar, which is half of the pairs that are 0.69 similar; what
Headway's 20 bands of 6 find is checked against the threshold. datatrove needs packages of its own: give the Python of
an environment with `pip install datatrove spacy tokenizers orjson regex "xxhash<4"`; without it its columns are n/a.

    python benchmarks/data/dedup.py
    python benchmarks/data/dedup.py --datatrove /path/to/venv/bin/python --documents 20000 --output dedup.json

Recall: of all pairs whose true similarity reaches the threshold, the share of which one at least is gone. Precision: of
the documents that are gone, the share that is truly that similar to one that stays. Both without pairs of equal texts.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from planted import Planted, jaccard, plant, shingles, similar_pairs

from headway.config.sections.data import DedupConfig
from headway.text.dedup import StoredPrints, find_duplicates, fingerprint_documents, join_prints

_NO_LIMITS = {"max_cluster": 1.0, "max_removed": 1.0, "max_removed_per_source": 1.0}
_BINS = (0.0, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
_BATCH = 1000
_SHOWN = 50
_PEER = Path(__file__).parent / "peers" / "datatrove_dedup.py"


def ours(texts: list[str], kind: str, folder: Path) -> dict[str, Any]:
    """Processor seconds of Headway to fingerprint (and store) and to find, and the documents that go."""
    wanted = {"documents": True} if kind == "exact" else {"near": True}
    config = DedupConfig.model_validate({**_NO_LIMITS, **wanted})
    fingerprint_documents(["builds the tables of characters: é"], config)
    started = time.process_time()
    parts = [fingerprint_documents(texts[start : start + _BATCH], config) for start in range(0, len(texts), _BATCH)]
    prints = join_prints(parts, config)
    prints.save(folder / "prints")
    signed = time.process_time()
    found = find_duplicates([StoredPrints(folder / "prints")], ["source"], config)
    ended = time.process_time()
    return {"sign": signed - started, "find": ended - signed, "removed": np.flatnonzero(~found.keep[0]).tolist()}


def theirs(python: str, texts: Path, kind: str) -> dict[str, Any] | None:
    """The same of datatrove, None when it does not run."""
    result = subprocess.run([python, str(_PEER), str(texts), kind], capture_output=True, text=True, check=False)
    if result.returncode:
        print(f"datatrove ({kind}) does not run: {result.stderr.strip().splitlines()[-1:]}")
        return None
    answer: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return answer


def take_turns(runs: dict[str, Callable[[], dict[str, Any] | None]], rounds: int) -> dict[str, dict[str, Any]]:
    """The fastest round of each."""
    best: dict[str, dict[str, Any]] = {}
    for _ in range(rounds):
        for name, run in runs.items():
            answer = run()
            if answer and (
                name not in best or answer["sign"] + answer["find"] < best[name]["sign"] + best[name]["find"]
            ):
                best[name] = answer
    return best


def quality(
    planted: Planted, truth: dict[tuple[int, int], float], removed: list[int], threshold: float
) -> dict[str, Any]:
    """Recall and precision, and the share of planted copies found by true similarity."""
    gone = set(removed)
    texts = planted.texts
    unequal = {pair: value for pair, value in truth.items() if texts[pair[0]] != texts[pair[1]]}
    found = sum(bool(gone & set(pair)) for pair in unequal)
    neighbours: dict[int, list[int]] = {}
    for left, right in truth:
        neighbours.setdefault(left, []).append(right)
        neighbours.setdefault(right, []).append(left)
    bins = []
    for low, high in zip(_BINS, (*_BINS[1:], 1.01), strict=True):
        inside = [bool(gone & {old, new}) for old, new, _, value in planted.pairs if low <= value < high]
        if inside:
            bins.append({"from": low, "pairs": len(inside), "found": sum(inside) / len(inside)})
    wrong = [number for number in gone if not any(other not in gone for other in neighbours.get(number, ()))]
    return {
        "pairs": len(unequal),
        "removed": len(gone),
        "recall": found / max(1, len(unequal)),
        "precision": 1 - len(wrong) / max(1, len(gone)),
        # Of some of them: each is compared with every document.
        "similarity_of_wrongly_removed": sorted(
            (_closest(planted, each, gone) for each in wrong[:_SHOWN]), reverse=True
        ),
        "by_similarity": bins,
    }


def _closest(planted: Planted, number: int, gone: set[int]) -> float:
    """True similarity of a document that went to the most similar one that stays."""
    this = shingles(planted.texts[number])
    others = (other for other in range(len(planted.texts)) if other not in gone)
    return round(max(jaccard(this, _sets(planted, other)) for other in others), 3)


_SETS: dict[int, frozenset[int]] = {}


def _sets(planted: Planted, number: int) -> frozenset[int]:
    if number not in _SETS:
        _SETS[number] = shingles(planted.texts[number])
    return _SETS[number]


def show(report: dict[str, Any]) -> None:
    """The tables, in Markdown."""
    names = list(report["speed"]["minhash"])
    print(f"\n{report['documents']:,} documents, {report['words_per_document']:.0f} words each on average\n")
    print("| one core, documents per second | " + " | ".join(names) + " | ratio |")
    print("|---|" + "---:|" * (len(names) + 1))
    for kind in ("exact", "minhash"):
        for stage in ("sign", "find", "both"):
            rates = [report["speed"][kind].get(name, {}).get(stage) for name in names]
            ratio = f"{rates[0] / rates[1]:.1f}" if len(rates) > 1 and rates[0] and rates[1] else "n/a"
            cells = " | ".join(f"{rate:,.0f}" if rate else "n/a" for rate in rates)
            print(f"| {kind}: {stage} | {cells} | {ratio} |")
    print("\n| planted copies | " + " | ".join(names) + " |")
    print("|---|" + "---:|" * len(names))
    for key in ("recall", "precision"):
        cells = " | ".join(
            f"{report['quality'][name][key]:.4f}" if name in report["quality"] else "n/a" for name in names
        )
        print(f"| {key} at {report['threshold']} | {cells} |")
    ours_bins = report["quality"]["headway"]["by_similarity"]
    for place, each in enumerate(ours_bins):
        cells = " | ".join(
            f"{report['quality'][name]['by_similarity'][place]['found']:.3f}" if name in report["quality"] else "n/a"
            for name in names
        )
        print(f"| found, similarity from {each['from']:g} ({each['pairs']} pairs) | {cells} |")


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datatrove", metavar="PYTHON", help="Python of an environment with datatrove")
    parser.add_argument("--documents", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    arguments = parser.parse_args()
    threshold = DedupConfig().similarity
    planted = plant(arguments.documents, arguments.seed)
    truth = similar_pairs(planted.texts, threshold)
    report: dict[str, Any] = {
        "machine": {"processor": platform.processor() or platform.machine(), "python": platform.python_version()},
        "documents": len(planted.texts),
        "words_per_document": sum(len(text.split()) for text in planted.texts) / len(planted.texts),
        "threshold": threshold,
        "speed": {},
        "quality": {},
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "texts.json").write_text(json.dumps(planted.texts))
        for kind in ("exact", "minhash"):
            runs: dict[str, Callable[[], dict[str, Any] | None]] = {
                "headway": partial(ours, planted.texts, kind, folder)
            }
            if arguments.datatrove:
                runs["datatrove"] = partial(theirs, arguments.datatrove, folder / "texts.json", kind)
            best = take_turns(runs, arguments.rounds)
            count = len(planted.texts)
            report["speed"][kind] = {
                side: {
                    "sign": count / each["sign"],
                    "find": count / each["find"],
                    "both": count / (each["sign"] + each["find"]),
                }
                for side, each in best.items()
            }
            if kind == "minhash":
                for side, each in best.items():
                    report["quality"][side] = quality(planted, truth, each["removed"], threshold)
    show(report)
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
