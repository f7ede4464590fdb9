"""Run under torchrun with four workers: every way of summing gradients against the plain sum."""

import warnings

import torch
import torch.distributed as dist
from torch import nn

from headway.config import Config, MeshShape
from headway.parallel.buckets import make_buckets
from headway.parallel.exchange import Exchange, Plain, PowerSGD, Rounded, TwoLevels, make_exchange
from headway.parallel.replicas import Replicas
from headway.parallel.world import World

warnings.filterwarnings("error", r".*is deprecated", FutureWarning)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
world = World(rank, size, rank, torch.device("cpu"), MeshShape(dp_replicate=2, dp_shard=2))
mesh = world.device_mesh
# The mean over `ITEMS` items is what half precision has to hold: sums are far too large for it.
ITEMS = 1000


def model() -> nn.Module:
    return nn.ModuleList([nn.Linear(33, 20), nn.Conv1d(4, 5, 3), nn.LayerNorm(7)])


def gradients(step: int, worker: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + worker)
    shapes = [p.shape for p in model().parameters()]
    return [ITEMS * 300 * torch.randn(shape, generator=generator) for shape in shapes]


def exchanged(exchange: Exchange, module: nn.Module, buckets: list, given: list[torch.Tensor]) -> list[torch.Tensor]:
    for p, gradient in zip(module.parameters(), given, strict=True):
        p.grad.copy_(gradient)
    for finish in [exchange.start(bucket) for bucket in buckets]:
        finish()
    return [p.grad.clone() for p in module.parameters()]


def sums(step: int) -> list[torch.Tensor]:
    return [torch.stack(parts).sum(0) for parts in zip(*(gradients(step, w) for w in range(size)), strict=True)]


def furthest(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(one, other, strict=True))


def check(exchange: Exchange, least: float, most: float) -> None:
    module = model()
    buckets = make_buckets(module, bucket_bytes=300)
    assert len(buckets) > 2
    error = furthest(exchanged(exchange, module, buckets, gradients(0, rank)), sums(0))
    assert least <= error < most, (type(exchange).__name__, error)


check(Plain(), 0, 1e-6)
check(TwoLevels(mesh["dp_shard"].get_group(), mesh["dp_replicate"].get_group()), 0, 1e-6)
check(Rounded(torch.bfloat16, ITEMS), 1e-4, 2e-2)
check(Rounded(torch.float16, ITEMS), 1e-5, 2e-3)
# Gradients as small as those of large models have most of fp16's digits too.
values = {
    "train": {"steps": 1, "global_batch": 1024, "sequence_length": 1024},
    "parallel": {"reduce_precision": "fp16"},
}
config = Config.model_validate(values)
alone = World(rank, size, rank, torch.device("cpu"))
small = make_exchange(config.parallel, config.train, config.seed, alone, Replicas(None, rank, size))
assert isinstance(small, Rounded)
module = model()
buckets = make_buckets(module)
given = [2.0**20 * 5e-7 / (ITEMS * 300) * gradient for gradient in gradients(0, rank)]
wanted = [2.0**20 * 5e-7 / (ITEMS * 300) * total for total in sums(0)]
assert furthest(exchanged(small, module, buckets, given), wanted) < 1e-3

check(PowerSGD(size, 64, 0), 0, 1e-6)  # no matrix is that large: nothing pays
check(PowerSGD(size, 2, 0), 0.5, 1.0)

# What one step misses, later ones bring: the sum over steps of what arrived follows that of what was sent.
module = model()
buckets, exchange = make_buckets(module), PowerSGD(size, 8, 0)
arrived = [torch.zeros_like(p) for p in module.parameters()]
constant = gradients(0, rank)
for step in range(1, 41):
    for total, part in zip(arrived, exchanged(exchange, module, buckets, constant), strict=True):
        total += part
    if step in (1, 40):
        error = furthest(arrived, [step * total for total in sums(0)])
        assert error > 0.3 if step == 1 else error < 0.1, (step, error)
dist.destroy_process_group()
