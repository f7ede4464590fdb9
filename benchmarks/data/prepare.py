"""From JSON Lines to token ids on disk, end to end, beside other tools: whole processes, the start of Python included.

All encode the same 60 MB of Python source with the same byte-level BPE of 32,768 tokens, in turns, on an otherwise idle
machine. That they write the same ids, documents ended by the end-of-text token, is checked against `tokenizers` in a
round of its own, which also samples memory. `--large` adds a corpus of 2 GB for the sustained rate.

    python benchmarks/data/prepare.py --peers PYTHON --megatron FOLDER --output prepare.json
    python benchmarks/data/prepare.py --large --only headway,floor

See README.md in this folder for how to make the environment of the peers; what is missing is "n/a".
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from measure import Measured, run
from python_corpus import Corpus, large_corpus, reference_ids, small_corpus, split_lines, tokens_hash

HERE = Path(__file__).parent
PACKAGES = ("gigatoken", "tiktoken", "datasets", "tokenizers", "datatrove", "transformers", "megatron-core", "torch")
#: How many times as long as ours the others should take at least, on two idle cores.
TARGETS = {
    "tiktoken": 4.0,
    "datasets-tiktoken": 7.0,
    "megatron": 8.0,
    "megatron-gigatoken": 8.0,
    "datasets-tokenizers": 20.0,
    "datatrove": 20.0,
}
SECONDS, TOKENS_PER_SECOND, PEAK_RSS = 1.2, 30e6, 1.5e9
#: These hold all of the input in memory, or take many minutes for it.
SMALL_ONLY = ("datasets-tiktoken", "datasets-tokenizers", "datatrove", "megatron", "megatron-gigatoken")


@dataclass(frozen=True)
class Contender:
    """One way to do the work."""

    name: str
    command: Callable[[Corpus, Path], list[str]]
    """The whole program for a corpus and an empty folder for the output."""
    tokens: Callable[[Path], Iterator[np.ndarray]]
    """The ids that it wrote there, in input order."""
    needs: str | None = None
    """Why it cannot run, if it cannot."""
    environment: dict[str, str] | None = None


def ours(name: str, *overrides: str) -> Contender:
    """`headway data prepare`, with things said that differ from the defaults."""

    def command(corpus: Corpus, output: Path) -> list[str]:
        # Nothing of the config but `data` matters to preparation.
        config = {
            "name": "benchmark",
            "data": {"sources": str(corpus.jsonl), "tokenizer": {"path": str(corpus.tokenizer)}},
            "train": {"steps": 1},
        }
        path = output / "run.yaml"
        path.write_text(json.dumps(config))  # JSON is YAML
        program = str(Path(sys.executable).with_name("headway"))
        return [program, "data", "prepare", str(path), f"data.store={output / 'store'}", *overrides]

    def tokens(output: Path) -> Iterator[np.ndarray]:
        splits = json.loads((output / "store" / "manifest.json").read_bytes())["splits"]
        for split, sources in splits.items():
            for source, part in sources.items():
                for shard in part["shards"]:
                    yield np.memmap(output / "store" / split / source / shard["file"], dtype="<u2", mode="r")

    return Contender(name, command, tokens)


def _one_file(output: Path) -> Iterator[np.ndarray]:
    yield np.memmap(output / "tokens.bin", dtype="<u2", mode="r")


def script(name: str, python: str, file: str, needs: str | None, *extra: str) -> Contender:
    """A program of `peers/` that writes one file."""

    def command(corpus: Corpus, output: Path) -> list[str]:
        return [python, str(HERE / "peers" / file), str(corpus.jsonl), str(corpus.tokenizer), str(output), *extra]

    return Contender(name, command, _one_file, needs)


def floor() -> Contender:
    """Reading, parsing and writing only, on one core."""

    def command(corpus: Corpus, output: Path) -> list[str]:
        known = [str(path) for path in _known(corpus)]
        program = [sys.executable, str(HERE / "peers" / "floor.py")]
        return [*program, str(corpus.jsonl), str(corpus.tokenizer), str(output), *known]

    return Contender("floor", command, _one_file)


def _known(corpus: Corpus) -> tuple[Path, Path]:
    ids, lengths = corpus.jsonl.with_suffix(".ids"), corpus.jsonl.with_suffix(".lengths")
    return (ids, lengths) if ids.exists() else reference_ids(corpus)


def datatrove(python: str, needs: str | None) -> Contender:
    """datatrove, which gives every worker files of its own."""

    def command(corpus: Corpus, output: Path) -> list[str]:
        program = [python, str(HERE / "peers" / "datatrove_script.py")]
        return [*program, str(split_lines(corpus, 2)), str(corpus.tokenizer), str(output)]

    def tokens(output: Path) -> Iterator[np.ndarray]:
        for path in sorted((output / "tokens").glob("*.ds")):
            yield np.memmap(path, dtype="<u2", mode="r")

    return Contender("datatrove", command, tokens, needs)


def megatron(name: str, python: str, checkout: Path | None, needs: str | None, program: str, *extra: str) -> Contender:
    """One of Megatron-LM's own programs."""
    if checkout is None or not (checkout / program).exists():
        needs = needs or f"no {program} of Megatron-LM"

    def command(corpus: Corpus, output: Path) -> list[str]:
        return [
            *(python, str(Path(checkout or ".") / program), "--input", str(corpus.jsonl)),
            *("--output-prefix", str(output / "out"), "--append-eod", "--tokenizer-type", "HuggingFaceTokenizer"),
            *("--tokenizer-model", str(corpus.tokenizer.parent), *extra),
        ]

    def tokens(output: Path) -> Iterator[np.ndarray]:
        path = output / "out_text_document.bin"
        (documents,) = np.fromfile(path.with_suffix(".idx"), dtype="<u8", count=1, offset=18)
        # The index: magic (9 bytes), version (8), code of the dtype (1), counts (8, 8), lengths (int32 each), ...
        count = int(np.fromfile(path.with_suffix(".idx"), dtype="<i4", count=int(documents), offset=34).sum())
        width = path.stat().st_size // count
        yield np.memmap(path, dtype=f"<{'u' if width == 2 else 'i'}{width}", mode="r")

    # An installed `megatron-core` would come before the checkout.
    return Contender(name, command, tokens, needs, {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(checkout)})


def contenders(peers: str | None, checkout: Path | None) -> list[Contender]:
    """Everyone, whether they can run or not."""
    python = peers or sys.executable
    there = _versions(python)

    def lacks(*packages: str) -> str | None:
        missing = [package for package in packages if package not in there]
        return f"not installed: {', '.join(missing)}" if missing else None

    fast = ("tools/preprocess_data_fast.py", "--use-gigatoken")
    hugging = lacks("torch", "transformers")
    return [
        ours("headway", "data.validation=0"),
        ours("headway-defaults"),
        floor(),
        script("gigatoken", python, "gigatoken_script.py", lacks("gigatoken")),
        script("tiktoken", python, "tiktoken_script.py", lacks("tiktoken")),
        script("datasets-tiktoken", python, "datasets_map.py", lacks("datasets", "tiktoken"), "tiktoken"),
        script("datasets-tokenizers", python, "datasets_map.py", lacks("datasets", "tokenizers"), "tokenizers"),
        megatron("megatron", python, checkout, hugging, "tools/preprocess_data.py", "--workers", "2"),
        megatron("megatron-gigatoken", python, checkout, hugging or lacks("gigatoken"), *fast),
        datatrove(python, lacks("datatrove")),
    ]


def _versions(python: str) -> dict[str, str]:
    """Versions of the peers in an environment."""
    code = (
        "import json, importlib.metadata as m\n"
        f"print(json.dumps({{d.name.lower(): d.version for d in m.distributions() if d.name.lower() in {PACKAGES}}}))"
    )
    return dict(json.loads(subprocess.run([python, "-c", code], capture_output=True, check=True).stdout))


class Race:
    """Contenders on one corpus.

    Args:
        corpus: What they all encode.
        folder: Where they write; emptied before each.
        reference: Hash of the right ids; None when nobody knows it, then they are compared with each other.
    """

    def __init__(self, corpus: Corpus, folder: Path, reference: str | None) -> None:
        self._corpus, self._folder, self._reference = corpus, folder, reference
        self.facts: dict[str, dict[str, Any]] = {}
        self.times: dict[str, list[Measured]] = {}

    def check(self, contender: Contender, *, timed: bool) -> None:
        """Run once and look at ids and memory; warms caches of files besides."""
        if contender.needs:
            self.facts[contender.name] = {"n/a": contender.needs}
            return
        measured = self._run(contender, sample_every=0.05)
        if not self._failed(contender, measured):
            self.facts[contender.name] = {**self._ids(contender), "peak_rss": measured.peak_rss}
            self.times[contender.name] = [measured] if timed else []

    def round(self, everyone: Sequence[Contender]) -> None:
        """Time each once, and see that it has done the same work again."""
        for contender in everyone:
            if contender.name in self.times:
                measured = self._run(contender)
                if not self._failed(contender, measured):
                    self.times[contender.name].append(measured)
                    assert self._ids(contender).items() <= self.facts[contender.name].items(), contender.name

    def _ids(self, contender: Contender) -> dict[str, Any]:
        count, digest = tokens_hash(contender.tokens(self._folder))
        self._reference = self._reference or digest
        return {"tokens": count, "sha256": digest, "same_ids": digest == self._reference}

    def _failed(self, contender: Contender, measured: Measured) -> bool:
        if measured.status:
            last = (measured.output.strip().splitlines() or ["nothing said"])[-1]
            self.facts[contender.name] = {"n/a": f"exit status {measured.status}: {last[:200]}"}
            self.times.pop(contender.name, None)
        return bool(measured.status)

    def _run(self, contender: Contender, sample_every: float | None = None) -> Measured:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        command = contender.command(self._corpus, self._folder)
        log = self._folder.with_suffix(".log")
        print(f"  {contender.name}", end=" ", file=sys.stderr, flush=True)
        measured = run(command, log=log, environment=contender.environment, sample_every=sample_every)
        print(f"{measured.seconds:.2f} s", file=sys.stderr)
        return measured

    def results(self) -> dict[str, dict[str, Any]]:
        """Per contender: seconds (minimum, median, maximum), processor seconds, rate, memory."""
        results = {}
        for name, facts in self.facts.items():
            results[name] = dict(facts)
            runs = self.times.get(name)
            if runs:
                seconds = [measured.seconds for measured in runs]
                median = statistics.median(seconds)
                results[name] |= {
                    "seconds": {"min": min(seconds), "median": median, "max": max(seconds), "all": seconds},
                    "user_seconds": statistics.median(measured.user for measured in runs),
                    "system_seconds": statistics.median(measured.system for measured in runs),
                    "tokens_per_second": facts["tokens"] / median,
                    "text_bytes_per_second": self._corpus.text_bytes / median,
                }
        return results


def ratios(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """How many times as long as ours the others take, by medians."""
    ours_median = results["headway"]["seconds"]["median"]
    return {
        name: result["seconds"]["median"] / ours_median
        for name, result in results.items()
        if "seconds" in result and not name.startswith("headway")
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """Results for people."""
    times = ratios(results) if "seconds" in results.get("headway", {}) else {}
    lines = [
        f"{'':20}{'min s':>8}{'median':>8}{'max':>8}{'cpu s':>8}{'M tok/s':>9}{'peak MB':>9}{'x ours':>8}{'target':>8}"
    ]
    for name, result in results.items():
        if "seconds" not in result:
            lines.append(f"{name:20}n/a: {result.get('n/a', 'not timed')}")
            continue
        spread = [result["seconds"][key] for key in ("min", "median", "max")]
        numbers = "".join(f"{value:8.2f}" for value in [*spread, result["user_seconds"] + result["system_seconds"]])
        ratio = f"{times[name]:8.2f}" if name in times else " " * 8
        target = f"{'>= ' + format(TARGETS[name], 'g'):>8}" if name in TARGETS else " " * 8
        rate, peak = result["tokens_per_second"] / 1e6, (result["peak_rss"] or 0) / 1e6
        wrong = "" if result["same_ids"] or name == "headway-defaults" else "  OTHER IDS"
        lines.append(f"{name:20}{numbers}{rate:9.2f}{peak:9.0f}{ratio}{target}{wrong}")
    return "\n".join(lines)


def race_small(everyone: Sequence[Contender], corpus: Corpus, folder: Path, rounds: int) -> dict[str, Any]:
    """60 MB: everyone, in turns."""
    ids, _ = reference_ids(corpus)
    race = Race(corpus, folder, tokens_hash([np.memmap(ids, dtype="<u2", mode="r")])[1])
    print("looking at ids and memory", file=sys.stderr)
    for contender in everyone:
        race.check(contender, timed=False)
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        turn = number % len(everyone)
        race.round([*everyone[turn:], *everyone[:turn]])
    return race.results()


def race_large(everyone: Sequence[Contender], corpus: Corpus, folder: Path, rounds: int) -> dict[str, Any]:
    """2 GB: those that can. Ours comes first, and what it wrote is what the floor writes again."""
    race = Race(corpus, folder, None)
    for contender in everyone:
        race.check(contender, timed=rounds == 1)
        if contender.name == "headway" and "n/a" not in race.facts["headway"]:
            _keep_ids(corpus, contender, folder)
    for _ in range(rounds if rounds > 1 else 0):
        race.round(everyone)
    return race.results()


def _keep_ids(corpus: Corpus, contender: Contender, output: Path) -> None:
    """Keep a store's ids where the floor finds them."""
    manifest = json.loads((output / "store" / "manifest.json").read_bytes())
    ids, lengths = corpus.jsonl.with_suffix(".ids"), corpus.jsonl.with_suffix(".lengths")
    with ids.open("wb") as file:
        for shard in contender.tokens(output):
            shard.tofile(file)
    with lengths.open("wb") as file:
        for source, part in manifest["splits"]["train"].items():
            for shard in part["shards"]:
                index = (output / "store" / "train" / source / shard["file"]).with_suffix(".idx")
                np.diff(np.fromfile(index, dtype="<u8").astype("<i8")).tofile(file)


def facts_of(corpus: Corpus) -> dict[str, Any]:
    """The corpus for the report, without places of this machine."""
    return {key: value for key, value in asdict(corpus).items() if key not in ("jsonl", "tokenizer")}


def machine(peers: str | None) -> dict[str, Any]:
    """Where this ran, and on what."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "ours": _versions(sys.executable),
        "peers": _versions(peers) if peers else {},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "headway-benchmarks")
    parser.add_argument("--peers", help="Python of the environment with the peers")
    parser.add_argument("--megatron", type=Path, help="checkout of Megatron-LM")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", help="names, separated by commas")
    parser.add_argument("--large", action="store_true", help="also 2 GB")
    parser.add_argument("--large-rounds", type=int, default=1)
    parser.add_argument("--large-bytes", type=int, default=2_000_000_000)
    parser.add_argument("--output", type=Path, help="JSON with all results")
    args = parser.parse_args()

    everyone = contenders(args.peers, args.megatron)
    if args.only:
        everyone = [contender for contender in everyone if contender.name in args.only.split(",")]
    facts = machine(args.peers)
    if facts["load_before"] > 0.5:
        print(f"warning: the machine is not idle (load {facts['load_before']:.1f})", file=sys.stderr)
    corpus = small_corpus(args.cache)
    folder = args.cache / "output"
    small = race_small(everyone, corpus, folder, args.rounds)
    report: dict[str, Any] = {"machine": facts, "corpus": facts_of(corpus), "results": small}
    report["targets"] = {"seconds": SECONDS, "ratios": TARGETS}
    print(f"{corpus.text_bytes / 1e6:.0f} MB, {corpus.documents:,} documents\n{table(small)}")
    if "seconds" in small.get("headway", {}):
        report["ratios"] = ratios(small)
        print(f"ours: {small['headway']['seconds']['median']:.2f} s (target {SECONDS} s)")
    if args.large:
        large = large_corpus(args.cache, corpus, args.large_bytes)
        names = [contender for contender in everyone if contender.name not in SMALL_ONLY]
        results = race_large(names, large, folder, args.large_rounds)
        report["large"] = {"corpus": facts_of(large), "results": results}
        report["targets"] |= {"tokens_per_second": TOKENS_PER_SECOND, "peak_rss": PEAK_RSS}
        print(f"\n{large.text_bytes / 1e6:.0f} MB, {large.documents:,} documents\n{table(results)}")
        print(f"targets: {TOKENS_PER_SECOND / 1e6:.0f} M tok/s, {PEAK_RSS / 1e6:.0f} MB")
    shutil.rmtree(folder, ignore_errors=True)
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
