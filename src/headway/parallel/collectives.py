"""Collectives whose names depend on the version of PyTorch: 2.13 has new ones, and warns at each call of the old."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

#: (output, input, group=None, async_op=False): everyone's inputs, one after the other.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
#: (output, input, op=SUM, group=None, async_op=False): this worker's part of the sum of all inputs.
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
