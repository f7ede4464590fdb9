"""Forward and backward tokens per second of Headway's decoder beside the same model of transformers.

Both have the same weights, batches and arithmetic, and take turns in one process, so that whatever else the machine
does meets both. Needs `pip install '.[hf]'`.

    python benchmarks/model_step.py
    python benchmarks/model_step.py --preset 30m --precision bf16 --compile --output model_step.json
    python benchmarks/model_step.py --model models/SmolLM3-tiny --precision fp32     # any family that is native
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headway.config import ModelConfig
from headway.models.build import build_model
from headway.models.decoder import Decoder
from headway.models.facts import flops_per_token
from headway.models.huggingface.export import export_model

Step = Callable[[], torch.Tensor]


def models(preset: str, folder: Path | None, vocab_size: int, device: torch.device) -> tuple[Decoder, nn.Module]:
    """Our decoder and transformers' model with the same weights: a Llama, or what a folder holds."""
    from transformers import AutoModelForCausalLM

    if folder is not None:
        ours = build_model(ModelConfig(from_pretrained=folder), vocab_size=1, seed=0)
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return ours.to(device).train(), theirs.to(device).train()
    ours = build_model(ModelConfig(preset=preset), vocab_size=vocab_size, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        export_model(ours, Path(folder) / "export")
        theirs = AutoModelForCausalLM.from_pretrained(Path(folder) / "export")
    return ours.to(device).train(), theirs.to(device).train()


def measure(
    steps: dict[str, tuple[nn.Module, Step]], device: torch.device, autocast: bool, rounds: int
) -> dict[str, list[float]]:
    """Seconds of forward and backward, by contender; two rounds to warm up are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 2):
        for name, (model, forward) in steps.items():
            model.zero_grad()
            synchronize(device)
            start = time.perf_counter()
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                loss = forward()
            loss.backward()
            synchronize(device)
            if number >= 2:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def synchronize(device: torch.device) -> None:
    """Wait for the device's queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(arguments: argparse.Namespace, precision: str) -> dict[str, Any]:
    """One comparison; prints a line and returns the figures."""
    device = torch.device(arguments.device)
    ours, theirs = models(arguments.preset, arguments.model, arguments.vocab, device)
    vocabulary = ours.config.vocab_size or arguments.vocab
    length, rows = arguments.sequence_length, arguments.rows
    tokens = torch.randint(vocabulary, (rows, length + 1), generator=torch.Generator().manual_seed(0)).to(device)
    ids, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    run_ours, run_theirs = (torch.compile(ours), torch.compile(theirs)) if arguments.compile else (ours, theirs)
    steps: dict[str, tuple[nn.Module, Step]] = {
        "headway": (ours, lambda: run_ours(ids, targets)),
        # `shift_labels`: targets as they are, so that both train on every position.
        "transformers": (
            theirs,
            lambda: run_theirs(input_ids=ids, labels=targets, shift_labels=targets, use_cache=False).loss,
        ),
    }
    losses = [steps["headway"][1]().item() / targets.numel(), steps["transformers"][1]().item()]
    assert abs(losses[0] - losses[1]) < 1e-3, f"the two do not compute the same loss: {losses}"
    seconds = measure(steps, device, precision == "bf16", arguments.rounds)
    speeds = {name: ids.numel() / statistics.median(times) for name, times in seconds.items()}
    best = {name: ids.numel() / min(times) for name, times in seconds.items()}
    flops = flops_per_token(ours.config, length)
    # Each round is a pair, one right after the other, so what else the machine does meets both.
    ratio = statistics.median(b / a for a, b in zip(seconds["headway"], seconds["transformers"], strict=True))
    print(
        f"{arguments.model or arguments.preset} {precision}{' compiled' if arguments.compile else ''},"
        f" {rows} x {length} tokens:"
        f" headway {speeds['headway']:,.0f} tokens/s ({speeds['headway'] * flops / 1e9:,.0f} GFLOP/s),"
        f" transformers {speeds['transformers']:,.0f} tokens/s; ratio {ratio:.2f}"
        f" (of the best rounds {best['headway'] / best['transformers']:.2f})"
    )
    return {"precision": precision, "median": speeds, "best": best, "ratio": ratio, "seconds": seconds}


def main() -> None:
    """Compare in each precision asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="4m", help="model shape (headway models)")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder instead of a shape")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--precision", choices=["fp32", "bf16", "both"], default="both")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--output", type=Path, help="also write the figures as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    precisions = ["fp32", "bf16"] if arguments.precision == "both" else [arguments.precision]
    results = [compare(arguments, precision) for precision in precisions]
    if arguments.output:
        setting = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
        machine = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
        arguments.output.write_text(json.dumps({**setting, **machine, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
