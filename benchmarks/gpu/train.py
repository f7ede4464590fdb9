"""Training speed on this machine's GPUs: whole runs of `headway train`, each in a process of its own.

1 B and 8 B shapes of the Llama 3 family in bf16 with torch.compile, by strategy: tokens per second, MFU, peak memory,
beside what `headway plan` expects. A shape that does not fit loses layers until it does, as the plan says, and the
table says how many are left. Speeds are medians over the steps after `--warmup`.

    python benchmarks/gpu/train.py
    python benchmarks/gpu/train.py --shapes 8b --strategies fsdp --sequence-length 8192 --output gpu.json
    python benchmarks/gpu/train.py --smoke        # a tiny shape on the CPU, to see that all of this works

`fsdp` takes all GPUs and needs two. Beside transformers' Llama on one GPU: benchmarks/model_step.py --device cuda.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from headway.config import SHAPES

LLAMA_VOCABULARY = 128_256


@dataclass(frozen=True)
class Cell:
    """One run."""

    shape: str
    layers: int
    strategy: str
    workers: int


def config_of(cell: Cell, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The run's config; text and vocabulary are small, since only speed is looked at."""
    return {
        "name": f"{cell.shape}-{cell.layers}-{cell.strategy}",
        "runs": str(folder / "runs"),
        "data": {
            "sources": [{"path": "stdlib:", "limit": "4 MB"}],
            "store": str(folder / "store"),
            "bad_documents": "skip",
            "tokenizer": {"vocab_size": 1024},
        },
        "model": {"preset": cell.shape, "layers": cell.layers, "vocab_size": arguments.vocabulary},
        "train": {
            "steps": arguments.warmup + arguments.steps,
            "sequence_length": arguments.sequence_length,
            "global_batch": arguments.rows * cell.workers,
            "micro_batch": arguments.rows if arguments.smoke else "auto",
            "precision": "fp32" if arguments.smoke else "bf16",
            "compile": not arguments.smoke,
            "activation_checkpointing": arguments.checkpointing,
            "device": "cpu" if arguments.smoke else "cuda",
        },
        "parallel": {"strategy": cell.strategy, "workers": cell.workers},
        "determinism": "off",
        "checkpoint": {"every": "1000000 steps"},
        "evaluation": {"every": None},
    }


def headway(*words: str) -> subprocess.CompletedProcess[str]:
    """The command of this Python's environment."""
    return subprocess.run([sys.executable, "-m", "headway", *words], capture_output=True, text=True)


def planned(config: Path, workers: int) -> dict[str, Any]:
    """What `headway plan` expects of the config as it is; {"n/a": why} when it cannot say."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    done = headway("plan", str(config), "--gpus", f"{workers}x{device.removeprefix('NVIDIA ')}", "--json")
    if done.returncode:
        return {"n/a": (done.stderr.strip().splitlines() or ["no plan"])[0]}
    wanted = yaml.safe_load(config.read_text())
    strategy = wanted["parallel"]["strategy"]
    recomputed = wanted["train"]["activation_checkpointing"]
    options = json.loads(done.stdout)["options"]
    for option in options:
        if option["strategy"] in (strategy, "zero3" if strategy == "fsdp" else strategy) and (
            option["activation_checkpointing"] == recomputed
        ):
            return dict(option)
    return {"n/a": f"no plan for {strategy}"}


def run(cell: Cell, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train, and read the run's metrics."""
    config = folder / "run.yaml"
    settings = config_of(cell, arguments, folder)
    config.write_text(yaml.safe_dump(settings))
    expected = planned(config, cell.workers)
    result: dict[str, Any] = {**vars(cell), "planned": expected}
    if expected.get("fits") is False:
        return result | {"n/a": "does not fit, says the plan"}
    for verb in (["data", "prepare"], ["train"]):
        done = headway(*verb, str(config))
        if done.returncode:
            return result | {"n/a": f"{' '.join(verb)}, exit {done.returncode}: {done.stderr.strip()[-400:]}"}
    lines = (folder / "runs" / settings["name"] / "metrics.jsonl").read_text().splitlines()
    steps = [record for line in lines if "speed/step_seconds" in (record := json.loads(line))][arguments.warmup :]

    def median(key: str) -> float | None:
        values = [step[key] for step in steps if key in step]
        return statistics.median(values) if values else None

    return result | {
        "tokens_per_second": median("speed/tokens_per_second"),
        "tokens_per_second_per_device": (median("speed/tokens_per_second") or 0) / cell.workers,
        "mfu": median("speed/mfu"),
        "peak_gib": median("memory/peak_gib"),
        "data_wait_share": median("speed/data_wait_share"),
        "step_seconds": [step["speed/step_seconds"] for step in steps],
    }


def largest(shape: str, strategy: str, workers: int, arguments: argparse.Namespace, folder: Path) -> Cell:
    """The shape with as many layers as fit; all of them where nobody can say."""
    layers = SHAPES[shape]["layers"]
    while layers > 2:
        cell = Cell(shape, layers, strategy, workers)
        config = folder / "plan.yaml"
        config.write_text(yaml.safe_dump(config_of(cell, arguments, folder)))
        if planned(config, workers).get("fits", True):
            return cell
        layers -= 2
    return Cell(shape, layers, strategy, workers)


def show(results: list[dict[str, Any]]) -> None:
    """A table for people."""
    head = f"{'shape':8}{'layers':>7}{'strategy':>10}{'GPUs':>6}"
    print(f"{head}{'tok/s/GPU':>11}{'MFU':>7}{'peak GiB':>10}{'plan GiB':>10}")
    for result in results:
        head = f"{result['shape']:8}{result['layers']:7}{result['strategy']:>10}{result['workers']:6}"
        if "n/a" in result:
            print(f"{head}  n/a: {result['n/a']}")
            continue
        mfu = f"{result['mfu']:.1%}" if result["mfu"] is not None else "n/a"
        peak = f"{result['peak_gib']:.1f}" if result["peak_gib"] is not None else "n/a"
        plan = result["planned"].get("peak_bytes")
        expected = f"{plan / 2**30:.1f}" if plan else "n/a"
        print(f"{head}{result['tokens_per_second_per_device']:11,.0f}{mfu:>7}{peak:>10}{expected:>10}")


def main() -> None:
    """Run all cells."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["1b", "8b"], choices=sorted(SHAPES))
    parser.add_argument("--strategies", nargs="+", default=["single", "fsdp"])
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=8, help="per GPU and step")
    parser.add_argument("--vocabulary", type=int, default=LLAMA_VOCABULARY)
    parser.add_argument("--checkpointing", default="none", choices=["none", "selective", "full"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, on the CPU")
    parser.add_argument("--output", type=Path, help="also write everything as JSON")
    arguments = parser.parse_args()
    devices = torch.cuda.device_count()
    if arguments.smoke:
        arguments.shapes, arguments.vocabulary, devices = ["1m"], 1024, 2
        arguments.sequence_length, arguments.rows, arguments.steps, arguments.warmup = 64, 2, 3, 1
    elif not devices:
        parser.error("there is no CUDA device here; --smoke tries a tiny shape on the CPU")
    results = []
    for shape in arguments.shapes:
        for strategy in arguments.strategies:
            workers = 1 if strategy == "single" else devices
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                if strategy != "single" and workers < 2:
                    cell = Cell(shape, SHAPES[shape]["layers"], strategy, workers)
                    results.append({**vars(cell), "n/a": "needs two GPUs"})
                    continue
                cell = largest(shape, strategy, workers, arguments, folder)
                print(f"{shape}, {cell.layers} layers, {strategy} on {workers} ...", file=sys.stderr, flush=True)
                results.append(run(cell, arguments, folder))
    show(results)
    if arguments.output:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        facts = {"device": device, "torch": torch.__version__, "cuda": torch.version.cuda}
        setting = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
        report = {"machine": facts, "settings": setting, "results": results}
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
