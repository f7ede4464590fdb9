"""A loop around Headway's own model and PyTorch's optimizer that does nothing besides, for `overhead.py`.

Forward, backward, clipping and update of the same rows from the same weights. It is a contender like those of
`speed.py`, which gives it its job; by itself it does nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from headway.config import load_config
from headway.core.machine.allocator import keep_freed_memory
from headway.models.build import build_model
from headway.telemetry.arithmetic import set_fp32_products
from headway.training.setup.compiling import compile_model

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from workload import Job, Recorder


def main() -> None:
    """Train."""
    # How matrices are multiplied, where memory comes from and what is compiled is the model's part, not the loop's.
    set_fp32_products(torch.device("cpu"))
    keep_freed_memory(of_all_sizes=True)
    job, recorder = Job.given(), Recorder()
    config = load_config(Path(job.model).parent / "config.yaml", [])
    model = build_model(config.model, vocab_size=config.data.tokenizer.vocab_size, seed=config.seed)
    if job.compile:
        compile_model(config.parallel, model)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, job.learning_rate, job.betas, weight_decay=0.0, fused=True)
    rows, total = job.load_rows(), 0.0
    for batch in rows:
        tokens = torch.from_numpy(batch.astype(np.int64))
        items = tokens.shape[0] * (tokens.shape[1] - 1)
        with job.autocast():
            loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) / items
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, job.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total += loss.item()
        recorder.step()
    recorder.write(job, total / len(rows))


if __name__ == "__main__":
    main()
