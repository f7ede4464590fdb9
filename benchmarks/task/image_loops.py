"""One contender of `images.py`: `python image_loops.py NAME STEPS PROCESSES WORKERS`; prints samples per second.

The loop by hand and Lightning do what a user of theirs would: `DataLoader` with processes, the fused kernel of AdamW,
clipping, DDP where there are several workers. The first tenth of the steps warms up and does not count.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from pictures import ROWS, Plain, loss, make_model
from torch.utils.data import DataLoader, DistributedSampler

OPTIMIZER = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}


def loader(processes: int, ranks: int, rank: int) -> tuple[DataLoader[Any], DistributedSampler[Any]]:
    """Return batches of a rank."""
    data = Plain()
    sampler: DistributedSampler[Any] = DistributedSampler(data, ranks, rank, seed=0)  # type: ignore[arg-type]
    more = {"num_workers": processes, "persistent_workers": processes > 0, "prefetch_factor": 2 if processes else None}
    return DataLoader(data, ROWS // ranks, sampler=sampler, drop_last=True, **more), sampler  # type: ignore[arg-type]


def plain(steps: int, processes: int) -> float:
    """Train by a loop of PyTorch."""
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    torch.manual_seed(0)
    model: torch.nn.Module = make_model()
    if ranks > 1:
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)  # type: ignore[arg-type]
    batches, sampler = loader(processes, ranks, rank)
    done, began, warm, epoch = 0, 0.0, steps // 10, 0
    while done < steps:
        sampler.set_epoch(epoch)
        epoch += 1
        for batch in batches:
            if done == warm:
                began = time.perf_counter()
            optimizer.zero_grad()
            value = loss(model, batch)
            value.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            float(value)  # a loss is logged
            done += 1
            if done == steps:
                break
    return (steps - warm) * ROWS / (time.perf_counter() - began)


def lightning(steps: int, processes: int, workers: int) -> float:
    """Train by Lightning."""
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.began, self.seconds = make_model(), 0.0, 0.0

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            if self.global_step == steps // 10:
                self.began = time.perf_counter()
            value = loss(self.model, batch)
            self.log("loss", value)
            return value

        def on_train_end(self) -> None:
            self.seconds = time.perf_counter() - self.began

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), **OPTIMIZER)  # type: ignore[arg-type]

    L.seed_everything(0, verbose=False)
    module = Module()
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    # With `devices` > 1 Lightning starts the other workers itself.
    batches, _ = loader(processes, 1, 0)
    more = {"num_workers": processes, "persistent_workers": processes > 0}
    batches = DataLoader(batches.dataset, ROWS // workers, shuffle=True, drop_last=True, **more)  # type: ignore[arg-type]
    trainer = L.Trainer(
        max_steps=steps, accelerator="cpu", devices=workers, strategy="ddp" if workers > 1 else "auto", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(module, batches)
    if rank:
        sys.exit(0)
    return (steps - steps // 10) * ROWS / module.seconds


def main() -> None:
    """Run one contender and print its speed as JSON."""
    name, steps, processes, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    speed = plain(steps, processes) if name == "plain" else lightning(steps, processes, workers)
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps({"samples_per_second": speed}))


if __name__ == "__main__":
    main()
