"""Peaks of steps with weights in bf16 on a CUDA device, or an emulated one, and what host memory holds meanwhile.

python host_weights_peak.py '{"model": {...}, "train": {...}, ...}'     # prints JSON
"""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings

import torch

from cuda_in_memory.emulated_cuda import VARIABLE, pinned_bytes
from headway.config import Config, resolve, resolve_lanes
from headway.models.build import build_model
from headway.parallel.world import World
from headway.run.session.assemble import assemble
from headway.training.step import TrainStep
from headway.training.task import LANGUAGE_MODELLING, Task

STEPS = 2


def main() -> None:
    config = resolve(Config.model_validate(json.loads(sys.argv[1])))
    grid = resolve_lanes(config, 1)
    world = World(0, 1, 0, torch.device("cuda", 0))
    assert config.model.vocab_size is not None
    model = build_model(config.model, vocab_size=config.model.vocab_size, seed=0)
    model.set_activation_checkpointing(config.train.activation_checkpointing)
    task = Task(model, None, LANGUAGE_MODELLING)  # type: ignore[arg-type]
    assembled = assemble(config, task, world, grid, 1)
    del model
    size = (grid.micro_batch, config.train.sequence_length)
    peaks = []
    left = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        rows = [
            {name: torch.randint(config.model.vocab_size, size, device="cuda") for name in ("ids", "targets")}
            for _ in range(grid.micro_batches)
        ]
        TrainStep(assembled).run({0: rows})
        rows.clear()
        peaks.append(torch.cuda.max_memory_allocated())
        left.append(torch.cuda.memory_allocated())
    pinned = pinned_bytes() if VARIABLE in os.environ else None
    print(json.dumps({"peaks": peaks, "left": left, "host": host_bytes(), "pinned": pinned}))


def host_bytes() -> int:
    """The bytes of all tensors in host memory."""
    found: dict[int, int] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for value in gc.get_objects():
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                storage = value.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


if __name__ == "__main__":
    main()
