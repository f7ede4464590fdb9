"""A plain loop in the manner of nanoGPT's `train.py`, around the model of transformers."""

from __future__ import annotations

import numpy as np
import torch
from llama import MeanLoss, build_optimizer
from workload import Job, Recorder


def main() -> None:
    """Train."""
    job, recorder = Job.given(), Recorder()
    model = MeanLoss(job)
    optimizer = build_optimizer(job, model)
    if job.compile:
        model.compile()
    rows, total = job.load_rows(), 0.0
    for batch in rows:
        tokens = torch.from_numpy(batch.astype(np.int64))
        with job.autocast():
            loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total += loss.item()
        recorder.step()
    recorder.write(job, total / len(rows))


if __name__ == "__main__":
    main()
