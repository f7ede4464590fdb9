"""Run under torchrun: checks the tree's all-reduce and reduce-scatter against their definition, on every worker."""

import torch
import torch.distributed as dist

from headway.parallel.tree import tree_all_reduce_, tree_reduce_scatter


def tree_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    return tree_sum([a + b for a, b in zip(parts[::2], parts[1::2], strict=True)])


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
for numel in (1, 2, 3, 5, 64, 1001):
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(numel)
        parts = [(torch.randn(numel, generator=generator) * 10.0**r).to(dtype) for r in range(size)]
        mine = parts[rank].clone()
        tree_all_reduce_(mine)
        assert torch.equal(mine, tree_sum(parts)), (rank, numel, dtype)
        wide = [part.repeat(size) for part in parts]
        for number, part in enumerate(wide):
            part[::size] += number
        tree_reduce_scatter(mine, wide[rank].clone())
        assert torch.equal(mine, tree_sum(wide).chunk(size)[rank]), (rank, numel, dtype)
dist.destroy_process_group()
