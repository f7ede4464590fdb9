"""Strategies: what each keeps on a worker, sums, needs and allows. The only place that knows their names.

Everything that differs between strategies is a trait of a `StrategySpec`; checks, plans, trials, advice and benchmarks
ask it. A spec from outside is named in the config as `package.module:NAME` (docs/extending/strategy.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

from headway.config.specs import Package, Spec, choices, resolve_spec
from headway.core.errors import ConfigError


def _no_problems(config: Any, data: int) -> Iterator[ConfigError]:
    yield from ()


@dataclass(frozen=True, kw_only=True)
class StrategySpec(Spec):
    """A value of `parallel.strategy`.

    `build` makes a `headway.parallel.strategy.Strategy` from a module, a `World` and a `Config`.
    """

    build_elastic: str | None = None
    """Like `build`, for sums in the fixed tree of `determinism: elastic`; None if it has none."""
    build_on_host: str | None = None
    """Like `build`, with masters and moments in host memory (`train.weights`); None if it has none."""
    stands_for: str | None = None
    """The strategy of which this is another name."""
    works_alone: bool = False
    """Whether it is made for a worker that shares its weights with no other; else that worker has `FOR_ONE_WORKER`."""
    sums_gradients: bool = True
    """Whether gradients are summed over workers."""
    overlaps_backward: bool = False
    """Whether sums of whole gradients overlap with the last backward pass."""
    fills_buckets: bool = True
    """Whether gradients lie in buckets that exist before the backward pass; else autograd makes them one by one."""
    shards_moments: bool = False
    """Whether each worker has the moments of a part of the weights only."""
    shards_gradients: bool = False
    """Whether each worker keeps the summed gradients of a part of the weights only, from micro-batch to micro-batch."""
    shards_weights: bool = False
    """Whether each worker keeps a part of every weight, and gathers whole ones one unit at a time."""
    has_copies: bool = False
    """Whether `parallel.replicate` may arrange its workers in groups that hold copies of each other."""
    two_levels: bool = False
    """Whether its workers are copies of groups that shard weights, so that both levels need two workers or more."""
    deepspeed_stage: int | None = None
    """Stage of ZeRO, if it runs on the library DeepSpeed."""
    counterpart: str | None = None
    """With DeepSpeed: Headway's own strategy that shards the same."""
    problems: Callable[[Any, int], Iterator[ConfigError]] = _no_problems
    """Yields why a `Config` cannot use it on a number of data-parallel workers, beyond what follows from the rest."""

    def __post_init__(self) -> None:
        if (self.shards_weights and not self.shards_gradients) or (self.shards_gradients and not self.shards_moments):
            raise ValueError("shards of weights imply shards of gradients, and these imply shards of moments")

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed manages weights, gradients and moments."""
        return self.deepspeed_stage is not None

    @property
    def cuts_parameters(self) -> bool:
        """Whether it replaces a module's parameters by shards; DeepSpeed cuts them out of Headway's sight.

        Elastic runs then sum shards lane by lane, and workers compute neighbouring lanes at the same time.
        """
        return self.shards_weights and not self.is_deepspeed

    @property
    def divides_update(self) -> bool:
        """Whether workers with whole weights each update a part of them and then exchange it."""
        return self.shards_moments and not self.shards_weights and not self.is_deepspeed

    @property
    def keeps_whole_gradients(self) -> bool:
        """Whether every worker has whole gradients, which can be summed after the backward pass."""
        return not self.shards_gradients and not self.is_deepspeed

    @property
    def offloads_itself(self) -> bool:
        """Whether it moves moments to host memory itself (`optimizer.offload`)."""
        return self.cuts_parameters or self.is_deepspeed


_SINGLE = StrategySpec(
    name="single",
    build="headway.parallel.strategy:Single",
    build_elastic="headway.parallel.ddp:ElasticDataParallel",
    build_on_host="headway.parallel.host_weights.engine:HostWeights",
    works_alone=True,
    sums_gradients=False,
    fills_buckets=False,
)
_DDP = StrategySpec(
    name="ddp",
    build="headway.parallel.ddp:DataParallel",
    build_elastic="headway.parallel.ddp:ElasticDataParallel",
    overlaps_backward=True,
    has_copies=True,
)
_ZERO1 = StrategySpec(
    name="zero1",
    build="headway.parallel.zero:Zero1",
    build_elastic="headway.parallel.zero:ElasticZero",
    overlaps_backward=True,
    shards_moments=True,
)
_ZERO2 = StrategySpec(
    name="zero2",
    build="headway.parallel.zero:Zero2",
    build_elastic="headway.parallel.zero:ElasticZero",
    build_on_host="headway.parallel.host_weights.engine:HostWeightsByOwner",
    overlaps_backward=True,
    shards_moments=True,
    shards_gradients=True,
)
_ZERO3 = StrategySpec(
    name="zero3",
    build="headway.parallel.fsdp:FullyShardedDataParallel",
    build_elastic="headway.parallel.fsdp:FullyShardedDataParallel",
    build_on_host="headway.parallel.host_weights.engine:HostWeightsInShards",
    shards_moments=True,
    shards_gradients=True,
    shards_weights=True,
)
_HSDP = replace(_ZERO3, name="hsdp", build_on_host=None, has_copies=True, two_levels=True)


def _deepspeed(stage: int, counterpart: StrategySpec) -> StrategySpec:
    return StrategySpec(
        name=f"deepspeed_zero{stage}",
        build="headway.parallel.deepspeed:DeepSpeed",
        needs=Package("deepspeed", "DeepSpeed", "deepspeed"),
        works_alone=True,
        shards_moments=counterpart.shards_moments,
        shards_gradients=counterpart.shards_gradients,
        shards_weights=counterpart.shards_weights,
        deepspeed_stage=stage,
        counterpart=counterpart.name,
    )


#: Chooses by the number of workers.
AUTO = "auto"
#: Strategy of a worker that shares its weights with no other, whatever the config names.
FOR_ONE_WORKER = _SINGLE.name
#: Strategy of workers with copies of everything, which others are compared with.
FOR_COPIES = _DDP.name

#: Headway's strategies by name, in decreasing order of memory per worker; those of DeepSpeed last.
STRATEGIES = {
    spec.name: spec
    for spec in (
        replace(_DDP, name=AUTO, stands_for=FOR_COPIES),
        _SINGLE,
        _DDP,
        _ZERO1,
        _ZERO2,
        _ZERO3,
        replace(_ZERO3, name="fsdp", stands_for=_ZERO3.name),
        _HSDP,
        _deepspeed(1, _ZERO1),
        _deepspeed(2, _ZERO2),
        _deepspeed(3, _ZERO3),
    )
}
#: Strategies that run on the library DeepSpeed.
DEEPSPEED = tuple(name for name, spec in STRATEGIES.items() if spec.is_deepspeed)

StrategyName = Annotated[str, *choices(STRATEGIES)]


def find_strategy(name: str) -> StrategySpec:
    """Return the spec of a value of `parallel.strategy`.

    Raises:
        ConfigError: there is none, or it cannot be imported.
    """
    return resolve_spec(STRATEGIES, name, "parallel.strategy", StrategySpec)


def distinct_strategies() -> list[StrategySpec]:
    """Return Headway's strategies without second names, in the order of `STRATEGIES`."""
    return [spec for spec in STRATEGIES.values() if spec.stands_for is None]


def simplest_strategy(wanted: Callable[[StrategySpec], bool]) -> str:
    """Return the name of the first of Headway's own strategies with a trait, for messages that recommend one."""
    return next(spec.name for spec in distinct_strategies() if wanted(spec))


def strategy_of(name: str, *, alone: bool) -> str:
    """Return the strategy that a name stands for, given whether each worker shares its weights with no other."""
    spec = find_strategy(name)
    if alone and not spec.works_alone:
        return FOR_ONE_WORKER
    return spec.stands_for or name
