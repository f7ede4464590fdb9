"""The matrix products of a training step and nothing else: what no loop can do without, whatever it does about the
rest.

Per linear layer the product of the forward pass and the two of the backward pass, with operands that are there
already. Attention, norms, the loss and the update are left out. It is a contender of `speed.py`, which gives it its
job; how much faster than a peer it is, is how much faster a loop on this machine could be at all in that precision.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from ceiling import Llama
from torch import nn

from headway.telemetry.arithmetic import set_fp32_products

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from workload import Job, Recorder


def main() -> None:
    """Multiply."""
    set_fp32_products(torch.device("cpu"))
    job, recorder = Job.given(), Recorder()
    dtype = torch.bfloat16 if job.precision == "bf16" else torch.float32
    model = Llama(Path(job.model))
    weights = [layer.weight.detach() for layer in model.modules() if isinstance(layer, nn.Linear)]
    rows = job.load_rows()
    count = rows.shape[1] * (rows.shape[2] - 1)
    operands = [
        (
            torch.randn(count, weight.shape[1], dtype=dtype),
            weight.to(dtype),
            torch.randn(count, len(weight), dtype=dtype),
        )
        for weight in [*weights, model.head.detach()]
    ]
    for _ in rows:
        for x, weight, gradient in operands:
            _ = x @ weight.t()
            _ = gradient @ weight
            _ = gradient.t() @ x
        recorder.step()
    recorder.write(job, 0.0)


if __name__ == "__main__":
    main()
