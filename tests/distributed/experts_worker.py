"""Run under torchrun with four workers: experts that are dealt out, against a whole decoder that every worker has too.

Loads are uneven, one expert gets nothing from anybody, and a worker whose rows are padding sends tokens all the same.
"""

import sys

import torch
import torch.distributed as dist
from split_worker import batch, config_of, decoder

from headway.config import MeshShape
from headway.models.decoder import Decoder
from headway.parallel.blocks import block_of, gather_whole, local_part
from headway.parallel.norms import norm_parts, total_norm
from headway.parallel.strategy import make_strategy
from headway.parallel.world import World, open_world

MODEL = {
    "experts": 8,
    "experts_per_token": 2,
    "expert_ffn_dim": 24,
    "shared_experts": 1,
    "dense_layers": 1,
    "router_score": "sigmoid",
    "balance_loss": 0.3,
    "router_z_loss": 0.1,
    "init_std": 0.15,  # experts have a part in the norm that shows
}
UNLOVED = 5


def mixture(config: object) -> Decoder:
    model = decoder(config)  # type: ignore[arg-type]
    bias = model.mixtures()[0].bias_E
    assert bias is not None
    bias[UNLOVED] = -10.0  # nobody chooses it
    bias[2] = 0.3
    return model


def check(world: World, strategy: str) -> None:
    config = config_of(world.mesh, strategy, **MODEL)
    whole, cut = mixture(config), mixture(config)
    spread = make_strategy(config, cut, world)
    before = {name: p.detach() for name, p in whole.named_parameters()}
    for name, p in cut.named_parameters():
        block = block_of(p)
        assert torch.equal(block.local, block.of(before[name])), (name, "is not a part of the whole")
        if strategy == "ddp" and ".experts." in name:
            assert block.local.shape[0] == 8 // world.mesh.ep, (name, block.local.shape)

    lanes = [batch(number) for number in range(2 * world.mesh.data)]
    expected = torch.stack([whole(ids, targets) for ids, targets in lanes]).sum()
    expected.backward()
    spread.begin()
    loss = 0.0
    for number in (0, 1):
        ids, targets = lanes[2 * world.data_rank + number]
        with spread.micro_batch(last_of_lane=True, last=number == 1):
            mine = cut(ids, targets)
            mine.backward()
        spread.end_lane()
        loss += mine.item() if world.counts_loss else 0.0
    spread.reduce()
    total = sum(worker[0] for worker in world.gather([loss]))
    assert abs(total - expected.item()) < 1e-5 * abs(total), (total, expected.item())

    counts, expected_counts = world.sum_integers(cut.take_counts()), whole.take_counts()
    loads = expected_counts[0, :8]
    assert loads[UNLOVED] == 0 and loads.max() > 2 * loads[loads > 0].min(), loads
    assert torch.equal(counts[:, :9], expected_counts[:, :9]), (counts, expected_counts)
    torch.testing.assert_close(counts.float(), expected_counts.float(), rtol=1e-4, atol=16)

    updated = [p for p in cut.parameters() if spread.owns_for_update(p)]
    norm = total_norm(world.gather(norm_parts([p for p in updated if spread.owns_for_norm(p)], exact=False)))
    expected_norm = float(torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()]))
    assert abs(norm - expected_norm) < 1e-5 * expected_norm, (norm, expected_norm)
    if strategy == "ddp":  # what one worker has is not all: the norm that it would find by itself is another
        alone = float(torch.nn.utils.get_total_norm([local_part(p.grad) for p in updated]))
        assert world.mesh.ep == 1 or abs(alone - expected_norm) > 1e-3 * expected_norm

    gradients = {name: block_of(p.grad) for name, p in cut.named_parameters() if p.grad is not None}
    together = gather_whole(gradients, world)
    if world.is_first:
        assert together.keys() == before.keys()
        for name, p in whole.named_parameters():
            torch.testing.assert_close(together[name], p.grad, rtol=1e-4, atol=1e-5, msg=f"gradient of {name} differs")


ALL = ("ddp", "zero1", "zero2", "zero3")
CHECKS: dict[str, list[tuple[MeshShape, tuple[str, ...]]]] = {
    "some": [
        (MeshShape(dp_shard=4, ep=2), ALL),
        (MeshShape(dp_replicate=2, dp_shard=2, ep=2), ("hsdp", "ddp")),
        (MeshShape(dp_shard=2, tp=2, ep=2), ("ddp", "zero3")),
        (MeshShape(cp=2, tp=2), ("zero1",)),
        (MeshShape(cp=2, tp=2, ep=4), ("auto",)),
    ],
    "all": [
        (MeshShape(**arrangement, ep=ep), ALL)
        for arrangement in ({"dp_shard": 4}, {"dp_shard": 2, "cp": 2}, {"dp_shard": 2, "tp": 2}, {"cp": 2, "tp": 2})
        for ep in (1, 2, 4)
    ],
}

if __name__ == "__main__":
    for mesh, strategies in CHECKS[sys.argv[1]]:
        with open_world("cpu", 120, mesh) as world:
            for strategy in strategies:
                check(world, strategy)
    assert not dist.is_initialized()
