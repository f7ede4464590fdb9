"""The regression gate: small comparisons with others, of which the *ratios* are held against the committed ones.

A ratio says how many times as good we are as somebody who does the same beside us, in turns, on the same machine; so it
is no test with a clock. Every comparison runs several times, one after the other in rounds; the median counts, and the
range says how far it can be trusted. A drop of over a tenth is reported. When the best repeat still reaches the
committed ratio, that is called noise.

Ratios are committed for each kind of machine: how many times as fast as a copy a disk is, or an encoder as another,
differs between two processors by more than any change of ours. On one of which nothing is committed nothing can drop;
`--strict` ends with 1 there, since it cannot tell.

What a script promises whatever was committed, it says itself ("promises" in its JSON: at most so many times as long as
a floor). A promise whose median is not kept is MISSED, apart from any drop: committing a ratio does not make it right.

    make bench            # or: python benchmarks/gate.py
    make bench-accept     # these ratios are the right ones from now on: benchmarks/ratios.json
    python benchmarks/gate.py --only checkpoint feed --repeats 5 --strict

To add a comparison, add it to `COMPARISONS`: a script that takes `--output FILE` and writes JSON, and where in that its
ratios are. Those with peers in environments of their own are not here (see the scripts themselves).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
#: What a ratio may fall by before it is reported.
TOLERANCE = 0.1
_LIMIT_SECONDS = 600


@dataclass(frozen=True)
class Ratio:
    """Where a script's JSON has a ratio, or what it is made of. More is better."""

    value: tuple[str | int, ...]
    over: tuple[str | int, ...] | None = None
    """Divides `value`."""

    def of(self, record: Any) -> float | None:
        """The ratio; None where the script had nobody to compare with."""
        value = _at(record, self.value)
        divisor = 1.0 if self.over is None else _at(record, self.over)
        return None if value is None or not divisor else value / divisor


@dataclass(frozen=True)
class Comparison:
    """One script of this folder."""

    script: str
    arguments: tuple[str, ...]
    ratios: Mapping[str, Ratio]
    """By what we are compared with, in words."""
    needs: tuple[str, ...] = ()
    """Modules without which it says nothing."""


_PACKINGS = ("results", "log-normal", "packings", 0)
_STEPS = ("results", "log-normal", "steps", 0, "seconds")

_TRAINING = (
    "--preset", "4m", "--vocabulary", "8192", "--only", "ceiling", "--compile", "off", "--rounds", "1", "--steps", "12",
    "--warmup", "3",
)  # fmt: skip

COMPARISONS: dict[str, Comparison] = {
    "model": Comparison(
        "model_step.py",
        ("--preset", "4m", "--rows", "2", "--rounds", "7", "--precision", "fp32"),
        {"forward and backward: transformers": Ratio(("results", 0, "ratio"))},
        needs=("transformers",),
    ),
    "training": Comparison(
        "train/speed.py",
        _TRAINING,
        {"speed: the best loop by hand": Ratio(("medians", "ceiling", "headway_speed_ratio"))},
    ),
    "training in bf16": Comparison(
        "train/speed.py",
        (*_TRAINING, "--precision", "bf16"),
        {"speed: the best loop by hand": Ratio(("medians", "ceiling", "headway_speed_ratio"))},
    ),
    "continue": Comparison(
        "train/continue_model.py",
        ("--eager", "--rows", "4", "--steps", "5"),
        {
            "a pretrained model: the best peer": Ratio(("ratios", "full", "headway")),
            "with an adapter: the best peer": Ratio(("ratios", "lora", "headway")),
        },
        needs=("transformers", "peft", "accelerate"),
    ),
    "checkpoint": Comparison(
        "checkpoint/save.py",
        ("--megabytes", "100", "--rounds", "3"),
        {
            "stall: a copy in memory": Ratio(
                ("medians", "copy", "stall_seconds"), over=("medians", "headway", "stall_seconds")
            ),
            "stall: torch.save": Ratio(
                ("medians", "torch.save", "stall_seconds"), over=("medians", "headway", "stall_seconds")
            ),
            "stall: dcp.async_save": Ratio(
                ("medians", "dcp async (process)", "stall_seconds"), over=("medians", "headway", "stall_seconds")
            ),
            "safe on the disk: one file": Ratio(
                ("medians", "disk", "total_seconds"), over=("medians", "headway", "total_seconds")
            ),
        },
    ),
    "feed": Comparison(
        "data/feed.py",
        ("--batches", "200", "--rounds", "3"),
        {"batches: nanoGPT": Ratio(("ratio_to_headway", "nanogpt"))},
    ),
    "encoders": Comparison(
        "data/encoders.py",
        ("--patterns", "headway", "--threads", "1", "--bytes", "6000000", "--rounds", "1"),
        {"tokens: tokenizers": Ratio(("results", "headway, 1 threads", "fastokens", "times_tokenizers"))},
        needs=("fastokens",),
    ),
    "packing": Comparison(
        "data/packing.py",
        ("--documents", "65536", "--lengths", "2048", "--step-lengths", "256", "--rows", "2", "--rounds", "3",
         "--threads", "1"),
        {
            "documents packed: first-fit in Python": Ratio(
                (*_PACKINGS, "best_fit", "documents_per_second"), over=(*_PACKINGS, "first_fit", "documents_per_second")
            ),
            "a step with a mask: without one": Ratio((*_STEPS, "unmasked"), over=(*_STEPS, "mask")),
        },
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """A ratio beside the committed one."""

    name: str
    state: str
    """"same", "better", "DROPPED", "noise" (dropped, but the best repeat has not), "new", or "n/a"."""
    committed: float | None
    median: float | None
    lowest: float | None
    highest: float | None

    @property
    def change(self) -> float | None:
        """By how much it is more."""
        return None if self.committed is None or self.median is None else self.median / self.committed - 1


def judge(found: Mapping[str, Sequence[float]], committed: Mapping[str, float]) -> list[Verdict]:
    """What has become of each ratio.

    Args:
        found: The repeats of each ratio that was measured.
        committed: Ratios by the same names, of this kind of machine.
    """
    verdicts = []
    for name in dict.fromkeys((*found, *committed)):
        before, repeats = committed.get(name), found.get(name)
        if not repeats:
            verdicts.append(Verdict(name, "n/a", before, None, None, None))
            continue
        median, lowest, highest = statistics.median(repeats), min(repeats), max(repeats)
        if before is None:
            state = "new"
        elif median < before * (1 - TOLERANCE):
            state = "noise" if highest >= before else "DROPPED"
        else:
            state = "better" if median > before * (1 + TOLERANCE) else "same"
        verdicts.append(Verdict(name, state, before, median, lowest, highest))
    return verdicts


#: Committed of one kind of machine, by comparison: what it was measured with (`versions`), and "ratios" by name.
Committed = dict[str, dict[str, Any]]


def ratios_of(committed: Committed, names: Sequence[str]) -> dict[str, float]:
    """Those of some comparisons, as `judge` names them."""
    kept = {name: committed[name]["ratios"] for name in names if name in committed}
    return {f"{name}: {what}": ratio for name, ratios in kept.items() for what, ratio in ratios.items()}


def accepted(verdicts: Sequence[Verdict], committed: Committed, versions: Mapping[str, str]) -> Committed:
    """What is to be committed: what was measured now, and of the rest what was there. A comparison of which only a part
    was measured keeps its versions, which are those of the other part."""
    found: dict[str, dict[str, float | None]] = {}
    for v in verdicts:
        name, _, what = v.name.partition(": ")
        found.setdefault(name, {})[what] = None if v.median is None else round(v.median, 3)
    kept = dict(committed)
    for name, ratios in found.items():
        before = committed.get(name, {})
        measured = {what: ratio for what, ratio in ratios.items() if ratio is not None}
        whole = len(measured) == len(ratios)
        if measured:
            own = versions if whole or not before else {key: before[key] for key in versions}
            kept[name] = {**own, "ratios": dict(sorted({**before.get("ratios", {}), **measured}.items()))}
    return dict(sorted(kept.items()))


@dataclass(frozen=True)
class Promise:
    """How many times as long as a floor we take, beside what we may."""

    name: str
    at_most: float
    repeats: tuple[float, ...]

    @property
    def state(self) -> str:
        """It is "met" or "MISSED" by the median, or "noise" where the best repeat has met it nevertheless."""
        if statistics.median(self.repeats) <= self.at_most:
            return "met"
        return "noise" if min(self.repeats) <= self.at_most else "MISSED"

    def __str__(self) -> str:
        spread = f"{min(self.repeats):.2f} to {max(self.repeats):.2f}"
        times = f"{statistics.median(self.repeats):.2f} times ({spread})"
        return f"{self.name}: {times}, {self.state} (at most {self.at_most})"


def promises_in(records: Mapping[str, Sequence[Any]]) -> list[Promise]:
    """What the scripts promise.

    Args:
        records: The JSON of each repeat, by the name of the comparison.
    """
    repeats: dict[tuple[str, float], list[float]] = {}
    for name, found in records.items():
        for promise in (promise for record in found for promise in record.get("promises", ())):
            repeats.setdefault((f"{name}: {promise['what']}", promise["at_most"]), []).append(promise["times"])
    return [Promise(name, at_most, tuple(times)) for (name, at_most), times in repeats.items()]


def table(verdicts: Sequence[Verdict]) -> str:
    """For people."""
    width = max((len(v.name) for v in verdicts), default=0)
    lines = [f"{'':{width}}{'committed':>11}{'now':>9}{'change':>9}{'range':>16}"]
    for v in verdicts:
        spread = "" if v.lowest is None else f"{v.lowest:.2f} to {v.highest:.2f}"
        change = "" if v.change is None else f"{v.change:+.0%}"
        lines.append(
            f"{v.name:{width}}{_number(v.committed):>11}{_number(v.median):>9}{change:>9}{spread:>16}  {v.state}"
        )
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"


def _at(record: Any, path: Sequence[str | int]) -> float | None:
    """What is at a path; None where there is nothing."""
    for key in path:
        try:
            record = record[key]
        except (KeyError, IndexError, TypeError):
            return None
    return None if record is None else float(record)


def missing(comparison: Comparison) -> str | None:
    """Why a comparison is left out; None when it is not."""
    if not (HERE / comparison.script).exists():
        return f"there is no {comparison.script}"
    absent = [module for module in comparison.needs if find_spec(module) is None]
    return f"{', '.join(absent)} is not installed" if absent else None


def run(comparison: Comparison) -> tuple[Any, str | None]:
    """The script's JSON, or why it failed."""
    with tempfile.TemporaryDirectory(prefix="headway-gate-") as folder:
        output = Path(folder) / "result.json"
        command = [sys.executable, str(HERE / comparison.script), *comparison.arguments, "--output", str(output)]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return None, f"not done after {_LIMIT_SECONDS} s"
        record = json.loads(output.read_text()) if output.exists() else None
        missed = result.returncode == 1 and record is not None and "promises" in record  # which is a result, too
        if record is None or (result.returncode and not missed):
            return None, (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
        return record, None


def measure(names: Sequence[str], repeats: int) -> tuple[dict[str, list[float]], dict[str, str], list[Promise]]:
    """The repeats of every ratio, what was left out or failed, with the reason, and what was promised."""
    found: dict[str, list[float]] = {}
    records: dict[str, list[Any]] = {}
    left_out = {name: why for name in names if (why := missing(COMPARISONS[name])) is not None}
    for number in range(repeats):
        for name in (n for n in names if n not in left_out):
            start = time.perf_counter()
            record, problem = run(COMPARISONS[name])
            print(f"round {number + 1}: {name}, {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
            if problem is not None:
                left_out[name] = f"FAILED: {problem}"
                continue
            records.setdefault(name, []).append(record)
            for what, ratio in COMPARISONS[name].ratios.items():
                value = ratio.of(record)
                if value is None:
                    left_out[f"{name}: {what}"] = "nobody to compare with was there"
                else:
                    found.setdefault(f"{name}: {what}", []).append(value)
    return found, left_out, promises_in(records)


def machine() -> str:
    """The kind of machine that this is, as far as ratios depend on it."""
    from headway.core.machine.processor import cpu_kind

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cpu_kind()}, {cores} cores"


def versions() -> dict[str, str]:
    """What is measured with."""
    import torch

    return {"python": platform.python_version(), "torch": torch.__version__}


def _listed(facts: Mapping[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in facts.items())


def main() -> None:
    """Measure, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(COMPARISONS), default=list(COMPARISONS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ratios", type=Path, default=HERE / "ratios.json", help="the committed ones")
    parser.add_argument("--accept", action="store_true", help="write what is measured now to --ratios")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="exit with 1 when a ratio dropped, a promise was missed, a script failed, or no ratio is committed",
    )
    parser.add_argument("--output", type=Path, help="JSON with all of it")
    options = parser.parse_args()
    machines: dict[str, Committed] = json.loads(options.ratios.read_text()) if options.ratios.exists() else {}
    here, used, load = machine(), versions(), os.getloadavg()[0]
    before = machines.get(here, {})
    found, left_out, promises = measure(options.only, options.repeats)
    verdicts = judge(found, ratios_of(before, options.only))
    print(f"times as good as ..., medians of {options.repeats}; load {load:.1f} before, {os.getloadavg()[0]:.1f} after")
    print(table(verdicts))
    for name, why in left_out.items():
        print(f"{name}: n/a, {why}")
    for promise in promises:
        print(promise)
    unknown = [name for name in options.only if name not in before]
    if unknown:
        others = f"; of: {'; '.join(sorted(machines))}" if machines else ""
        print(f"nothing to hold these against, {', '.join(unknown)}: no ratios are committed of {here}{others}")
    for name in options.only:
        if name in before and (then := {key: before[name][key] for key in used}) != used:
            print(f"{name}: the committed ratios were measured with {_listed(then)}; this is {_listed(used)}")
    missed = [promise.name for promise in promises if promise.state == "MISSED"]
    dropped = [v.name for v in verdicts if v.state == "DROPPED"]
    failed = [name for name, why in left_out.items() if why.startswith("FAILED")]
    if dropped:
        print(f"dropped by over {TOLERANCE:.0%}: {'; '.join(dropped)}")
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "machine": here, **used, "load": [load, os.getloadavg()[0]], "repeats": found, "left_out": left_out,
            "verdicts": [asdict(verdict) for verdict in verdicts],
            "promises": [{**asdict(promise), "state": promise.state} for promise in promises],
        }  # fmt: skip
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    if options.accept:
        machines[here] = accepted(verdicts, before, used)
        options.ratios.write_text(json.dumps(dict(sorted(machines.items())), indent=1) + "\n")
        print(f"{options.ratios} has these ratios of {here} now")
    elif options.strict and (dropped or missed or failed or unknown):
        sys.exit(1)


if __name__ == "__main__":
    main()
