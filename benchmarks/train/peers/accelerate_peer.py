"""A loop with Accelerate around the model of transformers."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from llama import MeanLoss, build_optimizer
from workload import Job, Recorder, RowsDataset


def main() -> None:
    """Train."""
    job, recorder = Job.given(), Recorder()
    rows, model = RowsDataset(job), MeanLoss(job)
    if job.compile:
        model.compile()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if job.precision == "bf16" else "no")
    loader = torch.utils.data.DataLoader(rows, rows.batch_size)
    model, optimizer, loader = accelerator.prepare(model, build_optimizer(job, model), loader)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), job.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        recorder.step()
    recorder.write(job, torch.stack(losses).mean().item())


if __name__ == "__main__":
    main()
