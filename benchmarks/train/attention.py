"""Causal attention on the CPU, forward and backward: ours by products beside PyTorch's kernel.

As a run has them: fp32 products by the library that uses the CPU, freed memory kept. They take turns; medians are
shown.

    python benchmarks/train/attention.py
    python benchmarks/train/attention.py --lengths 1024 4096 --heads 12 --kv-heads 12 --output attention.json
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
from headway.models.layers.causal_attention import causal_attention
from headway.telemetry.arithmetic import set_fp32_products

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def pytorchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`scaled_dot_product_attention` of (B, T, heads, H)."""
    turned = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*turned, is_causal=True, enable_gqa=q.shape[2] != k.shape[2]).transpose(1, 2)


def measure(options: argparse.Namespace, length: int, precision: str) -> dict[str, list[float]]:
    """Seconds of both, in turns."""
    rows, seconds = max(1, options.tokens // length), dict[str, list[float]]()
    ways: dict[str, Callable[..., torch.Tensor]] = {"headway": causal_attention, "torch": pytorchs}
    heads = (options.heads, options.kv_heads, options.kv_heads)
    given = [torch.randn(rows, length, n, options.width).to(_TYPES[precision]).requires_grad_() for n in heads]
    grad = torch.randn(given[0].shape).to(_TYPES[precision])
    for number in range(options.rounds + 1):
        for name, way in ways.items():
            for x in given:
                x.grad = None
            began = time.perf_counter()
            way(*given).backward(grad)
            if number:  # the first makes things ready
                seconds.setdefault(name, []).append(time.perf_counter() - began)
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256, 512, 1024, 2048], help="of a row")
    parser.add_argument("--tokens", type=int, default=1024, help="of all rows")
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, default=None, help="JSON with all measurements")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    set_fp32_products(torch.device("cpu"))
    keep_freed_memory(of_all_sizes=True)
    print(f"{options.heads} heads of {options.width}, {options.kv_heads} key-value heads, {options.threads} threads")
    print(f"{'':6}{'length':>8}{'ms':>9}{'torch ms':>10}{'is slower':>12}")
    records = []
    for precision in _TYPES:
        for length in options.lengths:
            seconds = measure(options, length, precision)
            ours, theirs = (statistics.median(seconds[name]) for name in ("headway", "torch"))
            print(f"{precision:6}{length:8,}{ours * 1e3:9.2f}{theirs * 1e3:10.2f}{theirs / ours:11.2f}x")
            records.append({"precision": precision, "length": length, "ratio": theirs / ours, "seconds": seconds})
    if options.output:
        settings = {key: str(value) for key, value in vars(options).items()}
        options.output.write_text(
            json.dumps({"settings": settings, "torch": torch.__version__, "measured": records}, indent=1)
        )


if __name__ == "__main__":
    main()
