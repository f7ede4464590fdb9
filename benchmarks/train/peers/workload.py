"""What every contender of `speed.py` is given, and what it gives back; needs torch and NumPy only."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Job:
    """One training, the same for all."""

    model: str
    """Folder with the model in Hugging Face's format, from whose weights all begin."""
    rows: str
    """NumPy file (steps, batch, length + 1) of token ids, in the order in which all see them."""
    result: str
    """Where the result goes."""
    precision: str
    """fp32, or bf16 for fp32 weights under autocast."""
    compile: bool
    threads: int
    learning_rate: float
    max_grad_norm: float
    betas: tuple[float, float] = (0.9, 0.95)

    @classmethod
    def given(cls) -> Job:
        """The one that is named on the command line."""
        job = cls(**json.loads(Path(sys.argv[1]).read_text()))
        torch.set_num_threads(job.threads)
        return job

    def load_rows(self) -> np.ndarray[Any, Any]:
        """Mapped, not read."""
        return np.load(self.rows, mmap_mode="r")

    @property
    def steps(self) -> int:
        """How many."""
        return len(self.load_rows())

    def autocast(self) -> torch.autocast:
        """The precision's."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bf16")


class RowsDataset(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows in their order, as `input_ids` and `labels` that are shifted already."""

    def __init__(self, job: Job) -> None:
        rows = job.load_rows()
        self.batch_size = rows.shape[1]
        self._rows = rows.reshape(-1, rows.shape[2])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.from_numpy(self._rows[index].astype(np.int64))
        return {"input_ids": row[:-1], "labels": row[1:]}


class Recorder:
    """Tells when steps end, a line with the wall-clock time for each, and in the end the result."""

    def __init__(self) -> None:
        result = json.loads(Path(sys.argv[1]).read_text())["result"]
        self._ends = Path(f"{result}.ends")

    def step(self) -> None:
        """A step has ended."""
        with self._ends.open("a") as file:
            file.write(f"{time.time()}\n")

    def write(self, job: Job, mean_loss: float) -> None:
        """Tell the mean loss of all steps."""
        Path(job.result).write_text(json.dumps({"mean_loss": mean_loss}))
