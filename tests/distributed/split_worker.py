"""Run under torchrun with four workers: what each has of a decoder whose matrices, rows and shards are cut.

Compares parameters, gradients and the loss with those of a whole decoder that every worker has beside the cut one.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from headway.config import Config, MeshShape
from headway.core.types import IGNORE_TARGET
from headway.models import loss as loss_module
from headway.models.build import build_model
from headway.models.decoder import Decoder
from headway.parallel.blocks import block_of, gather_whole
from headway.parallel.norms import norm_parts, total_norm
from headway.parallel.strategy import make_strategy
from headway.parallel.world import World, open_world

SHAPE = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 48, "vocab_size": 128, "qk_norm": True}
ROWS, LENGTH = 3, 32


#: Every variation of the decoder's parts, in three models.
NEMOTRON: dict[str, Any] = {
    "qk_norm": False,
    "norm": "layernorm1p",
    "activation": "relu2",
    "rotary_fraction": 0.5,
    "qkv_bias": True,
    "output_bias": True,
    "ffn_bias": True,
}
GLM: dict[str, Any] = {
    "post_norms": True,
    "qkv_bias": True,
    "ffn_bias": True,
    "rope_scaling": {"kind": "yarn", "factor": 2.0, "original_length": 16},
}

HYBRID: dict[str, Any] = {
    "qk_norm": False,
    "layers": 4,
    "layer_pattern": "M*-M",
    "activation": "relu2",
    "rotary_fraction": 0.0,
    "mamba": {"heads": 4, "head_dim": 8, "state_dim": 6, "groups": 2, "chunk": 8},
}


def config_of(mesh: MeshShape, strategy: str, **model: Any) -> Config:
    parallel = {"strategy": strategy, "tensor": mesh.tp, "context": mesh.cp, "workers": mesh.size, "expert": mesh.ep}
    return Config.model_validate(
        {"train": {"steps": 1, "sequence_length": LENGTH}, "model": {**SHAPE, **model}, "parallel": parallel}
    )


def decoder(config: Config) -> Decoder:
    model = build_model(config.model, vocab_size=128, seed=1)
    with torch.no_grad():  # norms that are not all one, or a mistake about them would not show
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
    return model


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every other batch only the front has targets: the worker with the middle of a row then has none."""
    tokens = torch.randint(128, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(number))
    targets = tokens[:, 1:].clone()
    if number % 2 == 0:
        targets[:, LENGTH // 4 :] = IGNORE_TARGET
    return tokens[:, :-1], targets


def check(world: World, strategy: str, **model: Any) -> None:
    config = config_of(world.mesh, strategy, **model)
    whole, cut = decoder(config), decoder(config)
    spread = make_strategy(config, cut, world)
    before = {name: p.detach() for name, p in whole.named_parameters()}
    for name, p in cut.named_parameters():
        block = block_of(p)
        assert torch.equal(block.local, block.of(before[name])), (name, "is not a part of the whole")

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

    counted = [p for p in cut.parameters() if spread.owns_for_update(p) and spread.owns_for_norm(p)]
    norm = total_norm(world.gather(norm_parts(counted, exact=False)))
    expected_norm = float(torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()]))
    assert abs(norm - expected_norm) < 1e-5 * expected_norm, (norm, expected_norm)

    gradients = {name: block_of(p.grad) for name, p in cut.named_parameters() if p.grad is not None}
    together = gather_whole(gradients, world)
    if world.is_first:
        assert together.keys() == before.keys()
        for name, p in whole.named_parameters():
            torch.testing.assert_close(together[name], p.grad, rtol=1e-4, atol=1e-5, msg=f"gradient of {name} differs")


def check_logits(world: World) -> None:
    config = config_of(world.mesh, "auto")
    whole, cut = decoder(config), decoder(config)
    make_strategy(config, cut, world)
    torch.testing.assert_close(cut(batch(0)[0]), whole(batch(0)[0]))


def check_chunks(world: World) -> None:
    """Never more than a chunk of logits, and of those a part."""
    seen: list[tuple[int, ...]] = []
    original = loss_module._chunk_loss

    def watched(logits: torch.Tensor, *rest: Any) -> Any:
        seen.append(tuple(logits.shape))
        return original(logits, *rest)

    loss_module._chunk_loss = watched
    config = config_of(world.mesh, "auto")
    cut = decoder(config)
    make_strategy(config, cut, world)
    hidden = cut.hidden_states(batch(0)[0])
    loss_module.vocabulary_parallel_cross_entropy(hidden, cut.projection, batch(0)[1], chunk_rows=40)
    loss_module._chunk_loss = original
    assert seen == [(40, 64), (40, 64), (16, 64)], seen


def check_timeouts(world: World) -> None:
    """Of groups of some workers too, which PyTorch would give half an hour."""
    for group in (world.weights_axis("dp_shard").get_group(), world.row_group):
        assert group is not None
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=120)


if __name__ == "__main__":
    for mesh in (MeshShape(dp_shard=2, tp=2), MeshShape(dp_shard=2, cp=2), MeshShape(cp=2, tp=2)):
        with open_world("cpu", 120, mesh) as world:
            check_timeouts(world)
            for strategy in ("ddp", "zero1", "zero2", "zero3"):
                check(world, strategy)
            check(world, "ddp", tie_embeddings=True, sliding_window=12)
            check(world, "ddp", **GLM)
            for strategy in ("ddp", "zero3"):
                check(world, strategy, **NEMOTRON)
            if mesh.tp > 1 and mesh.cp == 1:
                check_logits(world)
                check_chunks(world)
    with open_world("cpu", 120, MeshShape(dp_shard=4)) as world:
        for strategy in ("ddp", "zero3"):
            check(world, strategy, **HYBRID)
    assert not dist.is_initialized()
