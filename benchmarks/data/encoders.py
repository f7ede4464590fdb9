"""Encoders side by side: tokens per second, time to load, memory, and whether the ids are those of `tokenizers`.

For each pattern of words a vocabulary is trained on a third of the corpus. Every measurement is a process of its own
that holds the texts in memory and encodes them once, a mebibyte at a time: so no cache is warm but those that a library
fills on the way. Encoders take turns, and the best of the rounds counts.

    python benchmarks/data/encoders.py --output encoders.json
    python benchmarks/data/encoders.py --patterns headway,llama3 --threads 1,2 --vocabulary cl100k_base.tiktoken

`gigatoken` and `tiktoken` are "n/a" where they are not installed (`--peers PYTHON` is a Python that has them).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ENCODERS = ("fastokens", "gigatoken", "tiktoken", "tokenizers")
PATTERNS = "headway,gpt2,llama3,qwen2,o200k"

Encode = Callable[[list[str]], np.ndarray]


def texts_of(path: Path, size: int) -> list[str]:
    """The first documents of a JSON Lines file, about `size` characters."""
    texts: list[str] = []
    with path.open("rb") as lines:
        for line in lines:
            texts.append(json.loads(line)["text"])
            size -= len(texts[-1])
            if size <= 0:
                break
    return texts


def batches(texts: Sequence[str], size: int = 2**20) -> Iterator[list[str]]:
    """Lists of texts of about `size` characters."""
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if sum(map(len, batch)) >= size:
            yield batch
            batch = []
    if batch:
        yield batch


def open_encoder(name: str, content: str, threads: int) -> Encode:
    """A library's encoder as its users would call it; special tokens in a text are ordinary text."""
    if name == "fastokens":
        fast = importlib.import_module("fastokens").Tokenizer.from_json_str(content)
        return lambda texts: np.frombuffer(fast.encode_batch_flat(texts, split_special_tokens=True)[0], "<u4")
    if name == "gigatoken":
        spec = json.loads(content) | {"added_tokens": []}
        giga = importlib.import_module("gigatoken").Tokenizer.from_json(json.dumps(spec))
        if threads == 1:
            return lambda texts: np.concatenate([giga.encode(text) for text in texts])
        return lambda texts: np.asarray(giga.encode_batch(texts, parallel=True).layout.content.data)
    if name == "tiktoken":
        encoding = _tiktoken(json.loads(content))
        if threads == 1:
            return lambda texts: np.concatenate([encoding.encode_to_numpy(t, disallowed_special=()) for t in texts])
        return lambda texts: np.concatenate(
            [np.array(ids, "<u4") for ids in encoding.encode_ordinary_batch(texts, num_threads=threads)]
        )
    backend = importlib.import_module("tokenizers").Tokenizer.from_str(content)
    backend.encode_special_tokens = True
    return lambda texts: np.concatenate(
        [np.array(e.ids, "<u4") for e in backend.encode_batch_fast(texts, add_special_tokens=False)]
    )


def _tiktoken(spec: dict[str, Any]) -> Any:
    """The same vocabulary for tiktoken: ids are ranks, since merges come in the order of ids."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    byte_of = {chr(byte): byte for byte in plain} | {chr(256 + number): byte for number, byte in enumerate(others)}
    added = {token["content"] for token in spec["added_tokens"]}
    words = {token: number for token, number in spec["model"]["vocab"].items() if token not in added}
    ranks = {bytes(map(byte_of.__getitem__, token)): number for token, number in words.items() if " " not in token}
    steps = spec["pre_tokenizer"].get("pretokenizers", [])
    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    pattern = steps[0]["pattern"]["Regex"] if steps else gpt2
    return importlib.import_module("tiktoken").Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


def measure_one(corpus: Path, size: int, vocabulary: Path, name: str, threads: int) -> dict[str, Any]:
    """One encoder on one vocabulary, in this process."""
    texts = texts_of(corpus, size)
    content = vocabulary.read_text("utf-8")
    before = _peak()
    started = time.perf_counter()
    encode = open_encoder(name, content, threads)
    loaded = time.perf_counter()
    ids = [encode(batch) for batch in batches(texts)]
    ended = time.perf_counter()
    flat = np.concatenate(ids).astype("<u4")
    return {
        "tokens": len(flat),
        "bytes": sum(len(text.encode()) for text in texts),
        "sha256": hashlib.sha256(flat.tobytes()).hexdigest(),
        "load_seconds": loaded - started,
        "encode_seconds": ended - loaded,
        "tokens_per_second": len(flat) / (ended - loaded),
        "memory_bytes": _peak() - before,
    }


def _peak() -> int:
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) * 1024 if match else 0


def run_one(python: str, corpus: Path, size: int, vocabulary: Path, name: str, threads: int) -> dict[str, Any]:
    """`measure_one` in a fresh process; the reason when it cannot."""
    command = [python, __file__, "--one", str(corpus), str(size), str(vocabulary), name, str(threads)]
    count = str(threads)
    environment = {"RAYON_NUM_THREADS": count, "FASTOKENS_BPE_THREADS": count, "TOKENIZERS_PARALLELISM": "true"}
    result = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    if result.returncode:
        return {"error": (result.stderr.strip().splitlines() or ["it died"])[-1][:200]}
    return dict(json.loads(result.stdout))


def vocabularies(corpus: Path, cache: Path, patterns: Sequence[str], given: Sequence[Path]) -> dict[str, Path]:
    """A tokenizer.json for each pattern, trained once, and for each given file of whatever format."""
    from headway.data.tokenizing.tokenizer import Tokenizer
    from headway.text.tokenizing.train import train_on

    found = {}
    for pattern in patterns:
        folder = cache / f"pattern-{pattern}-32k"
        if not (folder / "tokenizer.json").exists():
            train_on(texts_of(corpus, 20_000_000), 32_768, pattern).save(folder)
        found[pattern] = folder / "tokenizer.json"
    for path in given:
        folder = cache / f"given-{path.name}"
        Tokenizer.load(path).save(folder)
        found[path.name] = folder / "tokenizer.json"
    return found


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """All measurements: by vocabulary, threads and encoder."""
    from python_corpus import small_corpus

    corpus = small_corpus(arguments.cache).jsonl
    made = vocabularies(corpus, arguments.cache, [p for p in arguments.patterns.split(",") if p], arguments.vocabulary)
    results: dict[str, Any] = {}
    for vocabulary, path in made.items():
        for threads in map(int, arguments.threads.split(",")):
            runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ENCODERS}
            for _ in range(arguments.rounds):
                for name in ENCODERS:
                    python = arguments.peers if name in ("gigatoken", "tiktoken") else sys.executable
                    runs[name].append(run_one(python, corpus, arguments.bytes, path, name, threads))
            results[f"{vocabulary}, {threads} threads"] = _judged(runs)
            _show(f"{vocabulary}, {threads} threads", results[f"{vocabulary}, {threads} threads"])
    return {"machine": platform.platform(), "cores": os.cpu_count(), "load": os.getloadavg(), "results": results}


def _judged(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The best round of each encoder, beside `tokenizers`."""
    best = {name: max(rounds, key=lambda run: run.get("tokens_per_second", 0.0)) for name, rounds in runs.items()}
    reference = best["tokenizers"]
    for result in best.values():
        if "error" not in result:
            result["exact"] = result["sha256"] == reference.get("sha256")
            result["times_tokenizers"] = result["tokens_per_second"] / reference["tokens_per_second"]
    return best


def _show(title: str, results: dict[str, Any]) -> None:
    print(f"\n{title}")
    print(f"{'encoder':<12}{'M tokens/s':>12}{'x tokenizers':>14}{'load s':>9}{'memory MB':>11}  ids")
    for name, result in results.items():
        if "error" in result:
            print(f"{name:<12}{'n/a':>12}  {result['error']}")
            continue
        print(
            f"{name:<12}{result['tokens_per_second'] / 1e6:>12.1f}{result['times_tokenizers']:>14.1f}"
            f"{result['load_seconds']:>9.2f}{result['memory_bytes'] / 1e6:>11.0f}"
            f"  {'the same' if result['exact'] else 'OTHER IDS'}"
        )


def main() -> None:
    """Measure, print tables, write JSON."""
    if sys.argv[1:2] == ["--one"]:
        corpus, size, vocabulary, name, threads = sys.argv[2:]
        print(json.dumps(measure_one(Path(corpus), int(size), Path(vocabulary), name, int(threads))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patterns", default=PATTERNS)
    parser.add_argument("--vocabulary", type=Path, action="append", default=[], help="a tokenizer of any format")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--bytes", type=int, default=30_000_000, help="characters of the corpus")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", default=sys.executable, help="a Python with gigatoken and tiktoken")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "headway-benchmarks")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    results = compare(arguments)
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
