"""Causal attention on a CPU: by products or by PyTorch's kernel, as a trial with the run's shape shows.

Which is faster depends on processor, type and length. Their bits differ, so the choice is part of a run's state: the
first attempt decides, and checkpoints keep the decision. Runs that are too short for a trial follow the processor.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from headway.core.console import notice
from headway.core.files.hashes import fingerprint
from headway.core.files.paths import user_cache
from headway.core.machine.processor import cpu_kind
from headway.models.layers.attention import Positions, attend, attends_by_products, choose_products
from headway.models.shape import Shape
from headway.training.setup.compiling import keep_measurements, kept_measurements

#: A run whose attention takes less time than this in total is not worth a trial.
_LEAST_SECONDS = 60.0
#: The other way is taken where it is so many times as fast: less may be noise, and all runs of a machine should agree.
_LEAST_GAIN = 1.1
_ROUNDS = 5


@dataclass(frozen=True)
class AttentionSeconds:
    """Forward and backward of a micro-batch in one layer."""

    products: float
    kernel: float

    def favour_products(self, by_rule: bool) -> bool:
        """Return whether products are to be used, where they would be without a trial or not."""
        if by_rule:
            return self.products < _LEAST_GAIN * self.kernel
        return self.products * _LEAST_GAIN < self.kernel


def products_pay(shape: Shape, precision: str, *, rows: int, length: int, micro_batches: int) -> bool:
    """Return whether a run computes causal attention faster by products; measurements stay in the user's cache.

    Args:
        rows: Rows of a micro-batch.
        length: Positions of a row.
        micro_batches: Number of micro-batches that this process computes in the whole run.
    """
    by_rule = attends_by_products()
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    sizes = [(rows, length, heads, shape.head_dim) for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
    file = user_cache() / "attention.json"
    machine = (cpu_kind(), torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.__version__)
    key = fingerprint({"machine": machine, "dtype": str(dtype), "sizes": sizes})
    known = kept_measurements(file, AttentionSeconds)
    if key not in known:
        with torch.random.fork_rng(devices=[]):
            inputs = [torch.randn(size).to(dtype).requires_grad_() for size in sizes]
        _seconds(inputs)
        if _seconds(inputs) * len(shape.attention_layers) * micro_batches < _LEAST_SECONDS:
            return by_rule
        known[key] = _measure(inputs)
        keep_measurements(file, known)
    seconds = known[key]
    favoured = seconds.favour_products(by_rule)
    change = f"{seconds.products * 1e3:.1f} ms by products, {seconds.kernel * 1e3:.1f} ms by PyTorch's kernel"
    notice(f"attention {'by products' if favoured else 'by the kernel'}: a layer takes {change} ({file})")
    return favoured


def _measure(inputs: list[torch.Tensor]) -> AttentionSeconds:
    """Measure both ways in turns; the fastest of each counts, since other processes may use the machine too."""
    before = attends_by_products()
    times: dict[bool, list[float]] = {True: [], False: []}
    try:
        for _ in range(_ROUNDS):
            for by_products, seconds in times.items():
                choose_products(by_products)
                seconds.append(_seconds(inputs))
    finally:
        choose_products(before)
    return AttentionSeconds(min(times[True]), min(times[False]))


def _seconds(inputs: list[torch.Tensor]) -> float:
    """Return the seconds of a forward and a backward pass."""
    q, k, v = inputs
    nowhere = torch.empty(0)
    began = time.perf_counter()
    y = attend(q, k, v, Positions(nowhere, nowhere, is_causal=True))
    torch.autograd.grad(y, inputs, torch.ones_like(y))
    return time.perf_counter() - began
