"""Run under torchrun with two workers: what sharded strategies hold at a time, and that options change no bits."""

import gc
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from headway.config import Config, MeshShape, resolve
from headway.models.build import build_model, build_without_memory
from headway.models.decoder import Decoder
from headway.parallel import zero
from headway.parallel.blocks import block_of
from headway.parallel.materialize import materialize
from headway.parallel.strategy import Strategy, make_strategy
from headway.parallel.world import World, open_world
from headway.training.optimizer import build_optimizer
from headway.training.setup.precision import autocast
from headway.training.setup.trial import LiveBytes

# As gloo's own threads let go of what they were given a little later than this one.
wait = dist.Work.wait


def patient(work: dist.Work, *arguments: Any) -> Any:
    result = wait(work, *arguments)
    time.sleep(0.01)
    return result


dist.Work.wait = patient  # type: ignore[method-assign]

BUCKET = 2**16
zero.BUCKET_BYTES = BUCKET
MODEL = {"dim": 64, "layers": 6, "heads": 2, "ffn_dim": 160, "vocab_size": 128, "max_sequence_length": 16}


def config(strategy: str, precision: str = "fp32", determinism: str = "run", **parallel: Any) -> Config:
    train = {"steps": 1, "sequence_length": 16, "global_batch": 2, "device": "cpu", "precision": precision}
    spread = {"strategy": strategy, "workers": 2, **parallel}
    values = {"model": MODEL, "train": train, "parallel": spread, "determinism": determinism}
    return resolve(Config.model_validate(values))


def built(world: World, asked: Config) -> tuple[Decoder, Strategy]:
    model = build_model(asked.model, vocab_size=128, seed=7).train()
    model.set_activation_checkpointing("full")
    return model, make_strategy(asked, model, world)


def peak(block: Callable[[], Any]) -> int:
    """Most bytes that a block had allocated at a time, by the allocator's events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        block()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    total = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        total += event.nbytes()
        most = max(most, total)
    return most


def live_peak(block: Callable[[], Any]) -> int:
    """Most bytes of tensors that came into being in a block and lived at a time."""
    with LiveBytes() as live:
        block()
    return int(live.peak)


def least(measure: Callable[[], int]) -> int:
    """The least of three times, all workers together: where the machine is busy, gloo's threads let go much later."""
    found = []
    for _ in range(3):
        gc.collect()  # or what an earlier time has left goes in the middle of this one
        time.sleep(0.1)
        found.append(measure())
    return min(found)


def rows(rank: int) -> torch.Tensor:
    return torch.randint(128, (1, 16), generator=torch.Generator().manual_seed(rank))


def gradient(world: World, asked: Config, model: Decoder, strategy: Strategy) -> None:
    strategy.begin()
    with strategy.micro_batch(True, True):
        with autocast(asked.train.precision, world.device):
            loss = model(rows(world.rank), rows(world.rank))
        loss.backward()
    strategy.reduce()


def weights(model: Decoder) -> list[torch.Tensor]:
    return [p.detach().full_tensor() if isinstance(p, DTensor) else p.detach().clone() for p in model.parameters()]


def zero2_hands_gradients_over(world: World) -> None:
    asked = config("zero2")
    model, strategy = built(world, asked)
    whole = sum(p.nbytes for p in model.parameters())
    assert whole > 10 * BUCKET
    most = least(lambda: live_peak(lambda: gradient(world, asked, model, strategy)))
    # Half of them are this worker's own; all of them waited when they were kept to the end of the backward pass.
    assert most < 0.85 * whole, (most, whole)
    most = least(lambda: live_peak(strategy.after_update))
    largest = max(p.nbytes for p in model.parameters())
    assert most <= 2 * max(BUCKET, largest), (most, whole)


def sharded_layers_are_in_half_precision(world: World) -> None:
    asked = config("zero3", "bf16")
    model, strategy = built(world, asked)
    whole = sum(p.numel() for p in model.parameters())
    root = 2 * 128 * 64 * 4
    seen = []
    layer = model.layers[0]
    layer.attention.register_forward_pre_hook(lambda m, _: seen.append((m.qkv.weight.dtype, m.qkv.weight.shape)))
    layer.attention_norm.register_forward_pre_hook(lambda m, _: seen.append((m.weight.dtype, m.weight.shape)))

    def forward() -> None:
        with autocast("bf16", world.device):
            outputs.append(model(rows(world.rank), rows(world.rank)))

    def forward_peak() -> int:
        outputs.clear()
        return peak(forward)

    outputs: list[torch.Tensor] = []
    forward()
    most = least(forward_peak)
    # bf16 copies of all matrices alone would be two bytes for each parameter.
    assert most < root * 3.5 + 2 * whole * 0.6, (most, whole)
    assert seen[0] == (torch.float32, (64,)) and seen[1] == (torch.bfloat16, (192, 64)), seen
    gradient(world, asked, model, strategy)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def options_change_no_bits(world: World) -> None:
    """Nor does a forward pass without gradient between two steps: what it brings together must not stay."""
    found = []
    for evaluated, options in ((False, {}), (True, {"reshard_after_forward": False}), (True, {"prefetch": 2})):
        asked = config("zero3", **options)
        model, strategy = built(world, asked)
        optimizer = build_optimizer(asked.optimizer, model, world.device, strategy.owns_for_update)
        for _ in range(2):
            gradient(world, asked, model, strategy)
            optimizer.step()
            if evaluated:
                with torch.no_grad():
                    model.eval()(rows(9), rows(9))
                model.train()
            assert all(isinstance(p, DTensor) for p in model.parameters()), options
        found.append(weights(model))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def accumulation_keeps_a_shard(world: World) -> None:
    """Eight micro-batches take what one does, and this worker's shard of the sums; whole gradients if it is asked."""

    def accumulate(asked: Config, model: Decoder, strategy: Strategy, lanes: int, micro_batches: int) -> None:
        strategy.begin()
        for lane in range(lanes):
            for index in range(micro_batches):
                last_of_lane = index == micro_batches - 1
                with strategy.micro_batch(last_of_lane, last_of_lane and lane == lanes - 1):
                    model(rows(index), rows(index)).backward()
        strategy.reduce()

    def taken(lanes: int, micro_batches: int, **options: Any) -> int:
        asked = config("zero3", **options)
        model, strategy = built(world, asked)
        return least(lambda: peak(lambda: accumulate(asked, model, strategy, lanes, micro_batches)))

    whole = sum(p.nbytes for p in build_model(config("zero3").model, vocab_size=128, seed=7).parameters())
    once = taken(1, 1)
    room = once + 0.55 * whole
    each = taken(1, 8, reduce_every="micro_batch")
    kept = taken(1, 8, reduce_every="step")
    assert each < room < kept, (once, each, kept, whole)
    # Elastic lanes: a shard for each level of the tree, and one to contribute to.
    elastic = {lanes: taken(lanes, 1, determinism="elastic") for lanes in (1, 8)}
    assert elastic[8] < elastic[1] + 2.1 * whole, (elastic, whole)


def a_model_is_never_whole(world: World) -> None:
    asked = config("zero3")
    expected = build_model(asked.model, vocab_size=128, seed=7)
    whole, largest = (f(p.nbytes for p in expected.parameters()) for f in (sum, max))
    models: list[Decoder] = []

    def make() -> None:
        model, first_value = build_without_memory(asked.model, vocab_size=128, seed=7)
        make_strategy(asked, model.train(), world)
        materialize(model, world, first_value)
        models.append(model)

    def make_peak() -> int:
        models.clear()
        gc.collect()
        return peak(make)

    taken = least(make_peak)
    assert taken < whole / 2 + 4 * largest < 0.8 * whole, (taken, whole, largest)
    assert all(torch.equal(a, b) for a, b in zip(weights(models[0]), expected.parameters(), strict=True))
    assert torch.equal(models[0].cos, expected.cos)
    parts = [block_of(p).local.flatten() for p in models[0].parameters() if p.ndim == 2]
    assert world.gather([float(torch.cat(parts).sum())])[0] != world.gather([float(torch.cat(parts).sum())])[1]


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("error", r".*is deprecated", FutureWarning)
    with open_world("cpu", 60, MeshShape(dp_shard=2)) as world:
        for check in (zero2_hands_gradients_over, sharded_layers_are_in_half_precision, options_change_no_bits,
                      accumulation_keeps_a_shard, a_model_is_never_whole):  # fmt: skip
            begin = time.perf_counter()
            check(world)
            if world.is_first:
                print(f"{check.__name__}: {time.perf_counter() - begin:.1f} s", file=sys.stderr)
