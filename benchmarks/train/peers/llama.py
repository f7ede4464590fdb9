"""The model of transformers, for the peers that train it; its loss is a mean over all tokens of shifted labels."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM
from workload import Job


class MeanLoss(torch.nn.Module):
    """Loss of a batch of `RowsDataset`, as a module, so that wrappers and compilers see one."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(job.model).train()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """A scalar."""
        return self.model(input_ids=input_ids, labels=labels, shift_labels=labels, use_cache=False).loss


def build_optimizer(job: Job, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The fastest AdamW that PyTorch has."""
    return torch.optim.AdamW(model.parameters(), job.learning_rate, job.betas, weight_decay=0.0, fused=True)
