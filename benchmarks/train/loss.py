"""The loss of a language model from hidden states, forward and backward: ours beside what PyTorch has.

`torch.nn.functional.linear_cross_entropy` (from PyTorch 2.13 on) with its chunks, which hold as little as ours, and
without, and the two steps that it stands for. They take turns; medians are shown, and the most bytes that tensors took
above inputs and gradients.

    python benchmarks/train/loss.py
    python benchmarks/train/loss.py --rows 4096 --width 768 --vocabulary 50304 --output loss.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

from headway.core.machine.allocator import keep_freed_memory
from headway.lab.bench.meter import Allocations, live_bytes
from headway.models.loss import linear_cross_entropy

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def contenders() -> dict[str, Loss]:
    """By name; ours is the first."""
    found: dict[str, Loss] = {"headway": lambda x, w, y: linear_cross_entropy(x, w, y) / len(y)}
    if hasattr(F, "linear_cross_entropy"):
        from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

        options = LinearCrossEntropyOptions()
        found["torch, chunked"] = lambda x, w, y: F.linear_cross_entropy(x, w, y, options=options)
        found["torch"] = lambda x, w, y: F.linear_cross_entropy(x, w, y)
    found["linear + cross_entropy"] = lambda x, w, y: F.cross_entropy(F.linear(x, w), y)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, default=None, help="JSON with all measurements")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory(of_all_sizes=True)
    x = torch.randn(options.rows, options.width, requires_grad=True)
    weight = (torch.randn(options.vocabulary, options.width) * options.width**-0.5).requires_grad_()
    targets = torch.randint(options.vocabulary, (options.rows,))
    functions = contenders()

    def once(name: str) -> float:
        x.grad = weight.grad = None
        began = time.perf_counter()
        functions[name](x, weight, targets).backward()
        return time.perf_counter() - began

    seconds: dict[str, list[float]] = {name: [] for name in functions}
    gradients, peaks = {}, {}
    for name in functions:
        once(name)  # makes things ready
        gradients[name] = weight.grad
        x.grad = weight.grad = None
        there, watch = live_bytes(), Allocations()
        watch.start()
        functions[name](x, weight, targets).backward()
        peaks[name] = watch.stop() - there - x.nbytes - weight.nbytes  # everybody leaves the gradients
    for _ in range(options.rounds):
        for name in functions:
            seconds[name].append(once(name))
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    ours = gradients["headway"]
    print(f"{options.rows:,} rows of {options.width}, vocabulary {options.vocabulary:,}, {options.threads} threads")
    print(f"{'':24}{'ms':>9}{'is slower':>12}{'MiB above gradients':>22}{'gradient differs':>18}")
    for name, median in medians.items():
        differs = float((gradients[name] - ours).norm() / ours.norm())
        ratio, mebibytes = median / medians["headway"], peaks[name] / 2**20
        print(f"{name:24}{median * 1e3:9.0f}{ratio:11.2f}x{mebibytes:22.1f}{differs:18.1e}")
    if options.output:
        record = {
            "settings": {key: str(value) for key, value in vars(options).items()},
            "torch": torch.__version__,
            "medians": medians,
            "seconds": seconds,
            "bytes_above_gradients": peaks,
        }
        options.output.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
