"""Peaks against what a real step takes, and how strategies compare."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from headway.config import Config, ModelConfig, resolve
from headway.core.errors import ConfigError
from headway.lab.plan.accelerators import parse_machines
from headway.lab.plan.layout import Layout
from headway.lab.plan.memory import plan_memory
from headway.lab.plan.memory_plan import MemoryPlan, Moment
from headway.lab.plan.prepare import make_plan
from headway.models.facts import count_parameters
from headway.parallel.world import World
from headway.training.optimizer.offload import HostOffload

BENCHMARKS = Path(__file__).parents[4] / "benchmarks" / "plan"
needs_benchmarks = pytest.mark.skipif(not BENCHMARKS.exists(), reason="the benchmarks are not part of this copy")


def benchmark(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"plan_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


@needs_benchmarks
@pytest.mark.parametrize(
    ("precision", "checkpointing", "micro_batches", "optimizer"),
    [("fp32", "none", 1, "adamw"), ("fp32", "full", 2, "adamw"), ("bf16", "full", 1, "adamw"),
     ("fp32", "full", 1, "muon"), ("fp32", "selective", 1, "lion"), ("fp32", "selective", 1, "adafactor"),
     ("fp32", "full", 1, "adamw8bit"), ("fp8", "none", 1, "adamw")],
)  # fmt: skip
def test_one_worker_takes_what_is_planned(
    precision: str, checkpointing: str, micro_batches: int, optimizer: str
) -> None:
    memory = benchmark("memory")
    if precision == "fp8":
        pytest.importorskip("torchao")
    model = "narrow" if precision == "fp8" else "tiny-experts" if optimizer == "adafactor" else "tiny"
    case = memory.Case("single", model, precision, checkpointing, micro_batches, optimizer)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        measured = memory.measure(case, World(0, 1, 0, torch.device("cpu")))
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
    config = case.config()
    planned = plan_memory(config, config.model, Layout.of(config, 1), "cpu").peak_bytes
    assert abs(planned / measured - 1) < 0.05


@pytest.mark.slow
@needs_benchmarks
def test_a_tracker_finds_what_is_planned_for_many_workers() -> None:
    trackers = benchmark("trackers")
    case = trackers.Case("4m", 16, checkpointing="none", precision="fp32", length=512)
    config = case.config(vocab_size=1024)
    tracked = trackers.track(config, case.workers)
    assert abs(trackers.planned(config, case.workers).peak_bytes / tracked["Total"] - 1) < 0.1


def plan(strategy: str, workers: int = 8, *, device: str = "cuda", **sections: dict[str, Any]) -> MemoryPlan:
    train = {"steps": 1, "sequence_length": 512, "global_batch": 64, "micro_batch": 2, **sections.get("train", {})}
    parallel = {"strategy": strategy, "workers": workers, **sections.get("parallel", {})}
    model = {"preset": "350m", "vocab_size": 32000, **sections.get("model", {})}
    values = {"model": model, "train": train, "parallel": parallel}
    values |= {name: sections[name] for name in ("determinism", "optimizer", "checkpoint") if name in sections}
    config = resolve(Config.model_validate(values))
    return plan_memory(config, config.model, Layout.of(config, workers), device)


def test_each_stage_keeps_less_than_the_one_before() -> None:
    once: dict[str, Any] = {"global_batch": 16}  # a single micro-batch
    peaks = [plan(strategy, train=once).peak_bytes for strategy in ("ddp", "zero1", "zero2", "zero3")]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 4


#: What llm-foundry trained on cards of 80 GB with gradients accumulated.
_TRAINED: list[tuple[str, int, dict[str, int]]] = [
    ("zero3", 8, {"dim": 7168, "layers": 48, "heads": 56, "ffn_dim": 19072}),
    ("zero3", 64, {"dim": 8192, "layers": 80, "heads": 64, "ffn_dim": 21824}),
    ("hsdp", 16, {"dim": 7168, "layers": 48, "heads": 56, "ffn_dim": 19072}),
]


@pytest.mark.parametrize(("strategy", "workers", "shape"), _TRAINED)
def test_large_models_accumulate_where_others_have_trained_them(
    strategy: str, workers: int, shape: dict[str, int]
) -> None:
    model = {**shape, "preset": None, "vocab_size": 50432, "tie_embeddings": True}
    train = {"sequence_length": 2048, "global_batch": 8 * workers, "precision": "bf16", "micro_batch": 1,
             "activation_checkpointing": "full"}  # fmt: skip
    usable = 0.9 * 80 * 2**30

    def peak(**parallel: Any) -> int:
        return plan(strategy, workers, model=model, train=train, parallel=parallel).peak_bytes

    assert peak() < usable
    assert peak() == peak(reduce_every="micro_batch")
    assert peak(reduce_every="step") > 2 * usable


@pytest.mark.parametrize("strategy", ["zero3", "hsdp"])
def test_micro_batches_that_accumulate_take_a_shard(strategy: str) -> None:
    def peak(micro_batches: int, **parallel: Any) -> int:
        return plan(strategy, train={"global_batch": 16 * micro_batches}, parallel=parallel).peak_bytes

    whole = 4 * count_parameters(ModelConfig(preset="350m", vocab_size=32000)).total
    shards = 8 if strategy == "zero3" else 4
    each = peak(8, reduce_every="micro_batch")
    assert peak(1) <= each <= peak(1) + 1.01 * whole / shards
    assert peak(8) > each + whole / 2


def test_two_levels_keep_more_than_one() -> None:
    one, two = plan("zero3"), plan("hsdp", parallel={"replicate": 4})
    assert two.peak.weights > 3 * one.peak.weights


def test_moments_are_divided_by_whole_parameters() -> None:
    moments = {n: plan("zero1", n, train={"micro_batch": 1}).peak.optimizer for n in (2, 64)}
    table = 8 * 32000 * 1024
    assert moments[64] == table  # no worker can have less than the largest parameter
    assert moments[2] < 1.01 * plan("ddp").peak.optimizer / 2


def test_elastic_runs_keep_sums_of_lanes() -> None:
    lanes: dict[str, Any] = {"micro_batch": 1, "lanes": 64}
    plain, elastic = plan("ddp", train=lanes), plan("ddp", train=lanes, determinism="elastic")  # type: ignore[arg-type]
    gradients = plain.peak.gradients
    assert elastic.peak_bytes - plain.peak_bytes == 3 * gradients  # 8 lanes on each worker: up to 1 + 2 + 4 of them


def test_gradients_of_sharded_weights_are_whole_while_micro_batches_add_up() -> None:
    one = plan("zero3", train={"global_batch": 16})
    several = plan("zero3")
    assert max(moment.gradients for moment in several.moments) > 3 * max(moment.gradients for moment in one.moments)


def test_half_precision_brings_half_the_bytes_of_layers_together() -> None:
    once: dict[str, Any] = {"global_batch": 16, "activation_checkpointing": "full"}
    full = {m.name: m for m in plan("zero3", train=once).moments}
    half = {m.name: m for m in plan("zero3", train={**once, "precision": "bf16"}).moments}
    units = full["loss"].communication - half["loss"].communication
    assert units > 0.45 * 4 * 12 * 1024**2  # a layer of the 350m preset has about 12 dim^2 elements
    assert half["last layer, backward"].activations < full["last layer, backward"].activations
    ahead = {m.name: m for m in plan("zero3", train=once, parallel={"prefetch": 3}).moments}
    unit = 2 * units
    assert ahead["loss, backward"].communication - full["loss, backward"].communication == pytest.approx(
        2 * unit, rel=0.01
    )


def test_zero2_lets_go_of_what_it_has_handed_over() -> None:
    model = {"preset": "1b"}
    once: dict[str, Any] = {"global_batch": 16}
    zero1, zero2 = (plan(name, 8, model=model, train=once) for name in ("zero1", "zero2"))
    gradients = max(moment.gradients for moment in zero2.moments)
    assert gradients < 0.35 * zero1.peak.gradients  # an eighth, a table, and the open buckets of eight owners
    sent = next(m for m in zero1.moments if m.name == "weights sent")
    assert sent.communication < 0.2 * zero1.peak.weights


def test_moments_in_host_memory_leave_the_gpu() -> None:
    for strategy in ("ddp", "zero2", "zero3"):
        here, there = (plan(strategy, optimizer={"offload": offload}) for offload in (False, True))
        assert all(moment.optimizer == 0 for moment in there.moments), strategy
        assert there.peak.weights == (0 if strategy == "zero3" else here.peak.weights)
    with pytest.raises(ConfigError, match="host memory already"):
        plan("ddp", device="cpu", optimizer={"offload": True})


def test_experts_count_whole_in_memory_and_as_far_as_they_are_active_in_speed() -> None:
    model = {"preset": "16m-moe", "vocab_size": 8192}
    made = make_plan(resolve(Config.model_validate({"model": model, "train": {"steps": 1}})), parse_machines("8xH100"))
    option = next(option for option in made.table if option.strategy == "ddp")
    assert option.memory is not None and option.memory.peak.weights == 4 * made.counts.total
    assert made.counts.active < 0.8 * made.counts.total
    assert made.flops_per_token < 6.5 * made.counts.total


def test_degrees_divide_what_they_cut() -> None:
    alone = plan("single", 1)
    tensor = plan("auto", 2, parallel={"tensor": 2})
    context = plan("auto", 2, parallel={"context": 2})
    pipeline = plan("auto", 2, parallel={"pipeline": 2})
    assert tensor.peak.weights < 0.51 * alone.peak.weights
    # Half, but for the mask and three times this worker's queries in each layer. It keeps queries (1), keys and values
    # of both runs for every query head (5) and outputs of attention twice (2); alone it would be queries, keys (1.5),
    # values (0.5), keys and values for every query head (2) and outputs (1).
    assert context.peak.weights == alone.peak.weights
    layers, queries, mask = 24, 2 * 256 * 16 * 64, 128 * 5 * 128
    assert context.peak.activations - alone.peak.activations / 2 == layers * 4 * (3 * queries + mask)
    assert pipeline.peak.weights < 0.7 * alone.peak.weights


def test_reserve_holds_the_largest_amount_of_every_stream() -> None:
    """What collectives need at one moment and layers at another is reserved at both."""
    moments = [Moment("gathered", weights=10, communication=7), Moment("layer", weights=10, activations=20)]
    assert MemoryPlan(moments).reserve_bytes == 0
    held = MemoryPlan(moments, caches=True)
    assert (held.peak_bytes, held.reserve_bytes) == (30, 7)
    assert MemoryPlan(moments, communicators=2).reserve_bytes == 2 * 256 * 2**20


def test_only_several_workers_of_gpus_have_communicators() -> None:
    assert plan("single", 1).communicators == 0
    assert plan("zero3").communicators == 2
    assert plan("zero3", device="cpu").reserve_bytes == 0


def test_compiled_layers_save_no_activation_of_the_gate() -> None:
    """The partition that compilers use keeps branches and product; eager layers keep silu(gate) too."""
    tokens, dim, inner = 64, 32, 256

    class FeedForward(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = torch.nn.Linear(dim, 2 * inner, bias=False)
            self.down = torch.nn.Linear(inner, dim, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate, linear = self.both(x).chunk(2, -1)
            down: torch.Tensor = self.down(torch.nn.functional.silu(gate) * linear)
            return down

    layer = FeedForward()
    x = torch.randn(tokens, dim, requires_grad=True)

    def saved(call: Any) -> int:
        found: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = call(x)
        del result
        return sum(found.values())

    difference = saved(layer) - saved(torch.compile(layer, backend="aot_eager_decomp_partition"))
    assert difference == 4 * tokens * inner
    train: dict[str, Any] = {"global_batch": 8, "micro_batch": 8, "precision": "bf16"}
    eager, compiled = (plan("single", 1, train={**train, "compile": c}).peak.activations for c in (False, True))
    ffn_dim = ModelConfig(preset="350m").ffn_dim
    layers = ModelConfig(preset="350m").layers
    assert ffn_dim is not None and layers is not None
    assert eager - compiled == 2 * 8 * 512 * ffn_dim * layers


def test_host_memory_is_what_an_offloaded_update_holds() -> None:
    """Copies of weights and gradients, and the moments: 16 bytes per parameter with AdamW."""
    weight = torch.nn.Parameter(torch.zeros(64, 32))
    offload = HostOffload([weight], lambda copies: torch.optim.AdamW(copies), torch.device("cpu"))
    weight.grad = torch.ones_like(weight)
    offload.step()
    copies = list(offload._host.values())
    held = [*copies, *(copy.grad for copy in copies), *offload.state[weight].values()]
    counted = sum(tensor.nbytes for tensor in held if tensor is not None and tensor.ndim)
    assert counted == 16 * weight.numel()
    total = count_parameters(ModelConfig(preset="350m", vocab_size=32000)).total
    host = plan("single", 1, optimizer={"offload": True}).host
    assert host.weights + host.gradients + host.optimizer == 16 * total
    plain = plan("single", 1).host
    assert plain.weights + plain.gradients + plain.optimizer == 0
    # A save stages weights and moments, wherever they are; with memory snapshots three buffers have them.
    assert plain.saves == host.saves == 12 * total
    assert plan("single", 1, checkpoint={"memory_every": 10}).host.saves == 36 * total
