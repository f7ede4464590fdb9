"""Collectives that torch 2.13 renamed; the old names warn at each call."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

#: (output, input, group=None, async_op=False): concatenate the inputs of all workers.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
#: (output, input, op=SUM, group=None, async_op=False): leave each worker its part of the sum of all inputs.
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
