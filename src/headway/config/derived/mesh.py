"""The arrangement of workers: the degree of every kind of parallelism, and the place of each worker."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from headway.config.derived.experts import sharding_problems
from headway.config.derived.lanes import LaneGrid, divisors, nearest, resolve_lanes
from headway.config.derived.pipeline import split_problems
from headway.config.optimizers import DEFAULT_OPTIMIZER, LIGHT_OPTIMIZER, find_optimizer
from headway.config.schema import Config
from headway.config.strategies import FOR_COPIES, distinct_strategies, find_strategy, simplest_strategy, strategy_of
from headway.core.errors import ConfigError

#: Most groups of rows in the first matrix of a feed-forward layer, and so the most parts it can be cut into.
_FFN_GROUPS = 16


@dataclass(frozen=True)
class MeshShape:
    """Degrees of parallelism, from the outermost dimension, which communicates least, to the innermost.

    Ranks count through the innermost dimension first, so that tensor-parallel workers are neighbours and share a
    machine.
    """

    pp: int = 1
    """Pipeline stages."""
    dp_replicate: int = 1
    """Copies of what `dp_shard` workers hold together."""
    dp_shard: int = 1
    """Workers that share the data and, if the strategy shards them, weights and moments."""
    cp: int = 1
    """Workers that share the positions of a row."""
    tp: int = 1
    """Workers that share each matrix."""
    ep: int = 1
    """Workers that share the experts of a mixture. This is not a separate dimension: they are neighbours within one
    stage and one copy that have different tokens (see `headway.parallel.experts`)."""

    @property
    def sizes(self) -> dict[str, int]:
        """Degree by name, outermost first."""
        return {
            "pp": self.pp,
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.dp_shard,
            "cp": self.cp,
            "tp": self.tp,
        }

    @property
    def arrangement(self) -> dict[str, int]:
        """All fields that define the mesh: `MeshShape(**arrangement)` is equal to it."""
        return {**self.sizes, **({"ep": self.ep} if self.ep > 1 else {})}

    @property
    def size(self) -> int:
        """Total number of workers."""
        return math.prod(self.sizes.values())

    @property
    def data(self) -> int:
        """Number of workers, or groups of workers, that compute different lanes."""
        return self.dp_replicate * self.dp_shard

    @property
    def is_data_parallel(self) -> bool:
        """Whether every worker computes different lanes."""
        return self.data == self.size

    @property
    def replicas(self) -> int:
        """Workers that compute gradients of the same weights, from other rows or other positions of the same rows."""
        return self.data * self.cp

    @property
    def expert_replicas(self) -> int:
        """Workers of a stage that have the same experts and compute their gradients from different tokens."""
        return self.data * self.cp * self.tp // self.ep

    def replica_rank(self, rank: int) -> int:
        """Return the index of a worker among the `replicas`."""
        return self.data_rank(rank) * self.cp + self.coordinates(rank)["cp"]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of a worker in every dimension."""
        places: dict[str, int] = {}
        for name, degree in reversed(self.sizes.items()):
            rank, places[name] = divmod(rank, degree)
        return places

    def data_rank(self, rank: int) -> int:
        """Return which of the `data` parts of a global batch a worker computes, alone or with others."""
        places = self.coordinates(rank)
        return places["dp_replicate"] * self.dp_shard + places["dp_shard"]

    def ranks_along(self, rank: int, *dimensions: str) -> list[int]:
        """Return the ranks, in order, whose position may differ from that of `rank` in these dimensions only."""
        mine = self.coordinates(rank)
        fixed = [name for name in mine if name not in dimensions]
        return [
            other for other in range(self.size) if all(self.coordinates(other)[name] == mine[name] for name in fixed)
        ]

    def __str__(self) -> str:
        cut = [f"{name} {degree}" for name, degree in self.sizes.items() if degree > 1]
        shared = f", experts on {self.ep}" if self.ep > 1 else ""
        return (" x ".join(cut) or "one worker") + shared


def resolve_mesh(config: Config, workers: int) -> MeshShape:
    """Resolve the arrangement of a number of workers.

    Raises:
        ConfigError: the degrees do not fit the workers, each other, or the model; the fix has the nearest that do.
    """
    for problem in _problems(config, workers):
        raise problem
    parallel = config.parallel
    data = workers // _split(config)
    copies = _copies(config, data)
    return MeshShape(parallel.pipeline, copies, data // copies, parallel.context, parallel.tensor, parallel.expert)


def resolve_grid(config: Config, workers: int) -> LaneGrid:
    """Resolve the grid of a step's rows for a number of workers, of which several may compute a lane together.

    Raises:
        ConfigError: as `resolve_mesh` and `resolve_lanes`.
    """
    return resolve_lanes(config, resolve_mesh(config, workers).data)


def usable_machines(config: Config, available: int) -> int:
    """Return how many of the available machines a run can train on; 0 if it has to wait for more.

    With `determinism: run` that is all that the config names. Otherwise it is the largest number, from the fewest that
    the config allows, whose workers can share the lanes.
    """
    parallel = config.parallel
    if config.determinism == "run":
        return parallel.machines if available >= parallel.machines else 0
    for machines in range(min(available, parallel.machines), (parallel.min_machines or 1) - 1, -1):
        try:
            resolve_grid(config, machines * parallel.workers)
        except ConfigError:
            continue
        return machines
    return 0


def effective_strategy(name: str, mesh: MeshShape) -> str:
    """Return the strategy that a name stands for on a mesh.

    A worker without replicas has no other worker to share state with, so its strategy is `FOR_ONE_WORKER`, unless the
    strategy works alone.
    """
    return strategy_of(name, alone=mesh.replicas == 1)


def _split(config: Config) -> int:
    """Return the number of workers that compute one lane together."""
    return config.parallel.pipeline * config.parallel.context * config.parallel.tensor


def _copies(config: Config, data: int) -> int:
    if config.parallel.replicate is not None:
        return config.parallel.replicate
    if not find_strategy(config.parallel.strategy).two_levels:
        return 1
    # Two levels need at least two of each: a copy on every machine, so that shards stay there, or else the fewest.
    machines = _machines(config, data * _split(config))
    if 1 < machines < data and data % machines == 0:
        return machines
    return min((n for n in divisors(data) if n > 1), default=1)


def _machines(config: Config, workers: int) -> int:
    """Return the number of machines that have the workers; 1 if that is unknown, as under torchrun."""
    here = config.parallel.workers
    return workers // here if config.parallel.machines > 1 and workers % here == 0 else 1


def crossing_groups(config: Config, workers: int) -> list[str]:
    """Describe groups of workers that exchange much in every layer and span several machines, one line each."""
    if _machines(config, workers) == 1:
        return []
    parallel = config.parallel
    found = []
    for name, group in (("tensor", parallel.tensor), ("context", parallel.tensor * parallel.context)):
        if getattr(parallel, name) > 1 and parallel.workers % group:
            found.append(
                f"parallel.{name}={getattr(parallel, name)} spans machines, which have {parallel.workers} workers each:"
                f" every layer waits for the network between them; {name} within a machine and data across is faster"
            )
    return found


def _problems(config: Config, workers: int) -> Iterator[ConfigError]:
    parallel = config.parallel
    split = _split(config)
    if workers % split:
        degrees = {"tensor": parallel.tensor, "context": parallel.context, "pipeline": parallel.pipeline}
        words = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
        yield ConfigError(
            f"{workers} workers cannot be arranged as {words}, which takes a multiple of {split}",
            where="parallel.workers, " + ", ".join(f"parallel.{name}" for name, n in degrees.items() if n > 1),
            fix=f"parallel.workers={max(1, round(workers / split)) * split}",
        )
        return
    here = parallel.workers
    tensor = parallel.tensor
    if _machines(config, workers) > 1 and here % tensor and tensor % here:
        yield ConfigError(
            f"of tensor={tensor}, some groups would lie on one machine of {here} workers and some on two",
            where="parallel.tensor, parallel.workers",
            fix=f"parallel.tensor={max(n for n in divisors(here) if n <= tensor)}",
        )
        return
    data = workers // split
    strategy = find_strategy(parallel.strategy)
    yield from _levels(config, data)
    yield from strategy.problems(config, data)
    yield from _replication(config, data)
    neighbours = data // _copies(config, data) * parallel.context * parallel.tensor
    yield from sharding_problems(config, neighbours)
    if config.determinism == "elastic" and strategy.build_elastic is None and not strategy.is_deepspeed:
        yield ConfigError(
            f"strategy '{strategy.name}' has no sum in the fixed tree of determinism 'elastic'",
            where="determinism, parallel.strategy",
            fix="determinism=run, or parallel.strategy=auto",
        )
    if config.determinism == "elastic" and split > 1:
        yield ConfigError(
            "determinism 'elastic' holds for data parallelism only; the degrees of tensor, context and pipeline"
            " parallelism change the order of sums",
            where="determinism, parallel.tensor, parallel.context, parallel.pipeline",
            fix="determinism=run, or leave those degrees at 1",
        )
    yield from _communication(config)
    yield from _optimizer(config, data)
    yield from _model(config)


def _levels(config: Config, data: int) -> Iterator[ConfigError]:
    """Check that the strategy can share its work among so many data-parallel workers."""
    parallel = config.parallel
    strategy = find_strategy(parallel.strategy)
    if not strategy.sums_gradients and data > 1:
        yield ConfigError(
            f"strategy '{strategy.name}' cannot use {data} data-parallel workers",
            where="parallel.strategy, parallel.workers",
            fix=f"parallel.strategy=auto, or parallel.workers={_split(config)}",
        )
    elif not strategy.sums_gradients and parallel.context > 1:
        yield ConfigError(
            f"strategy '{strategy.name}' sums no gradients, but workers that share a row's positions each have a part"
            " of them",
            where="parallel.strategy, parallel.context",
            fix="parallel.strategy=auto",
        )
    if strategy.two_levels and all(data % copies for copies in range(2, data)):  # also of fewer than four
        yield ConfigError(
            f"{strategy.name} arranges workers in two levels, copies and shards; {data} data-parallel workers cannot"
            " fill both",
            where="parallel.strategy, parallel.workers",
            fix=f"parallel.strategy={simplest_strategy(lambda s: s.shards_weights)}, or four workers or more",
        )


def _communication(config: Config) -> Iterator[ConfigError]:
    """Check that the strategy and the determinism allow the way in which gradients are summed."""
    parallel = config.parallel
    exact = config.determinism
    strategy = find_strategy(config.parallel.strategy)
    ways = {"compression": parallel.compression != "none", "reduce_precision": parallel.reduce_precision != "fp32"}
    for key in (key for key, wanted in ways.items() if wanted):
        where = f"parallel.{key}"
        if not (strategy.sums_gradients and strategy.keeps_whole_gradients):
            yield ConfigError(
                f"{key} needs whole gradients on every worker, which '{parallel.strategy}' does not have",
                where=f"{where}, parallel.strategy",
                fix=f"parallel.strategy={FOR_COPIES}, or leave {where} out",
            )
        if exact == "elastic":
            yield ConfigError(
                "determinism 'elastic' sums whole gradients in fp32; other sums would depend on the number of workers",
                where=f"{where}, determinism",
                fix=f"leave {where} out, or determinism={'off' if key == 'compression' else 'run'}",
            )
        elif key == "compression" and exact == "run":
            yield ConfigError(
                "powersgd keeps unsent parts of gradients outside of checkpoints, so a resumed run would differ",
                where=f"{where}, determinism",
                fix=f"determinism=off, or leave {where} out",
            )
    for key, parts, degree in (
        ("tensor", "tensor-parallel", parallel.tensor),
        ("expert", "expert-parallel", parallel.expert),
    ):
        if parallel.compression != "none" and degree > 1:
            yield ConfigError(
                f"powersgd factorises whole matrices, but {parts} workers have parts of them",
                where=f"parallel.compression, parallel.{key}",
                fix=f"parallel.compression=none, or parallel.{key}=1",
            )
    others = [*(key for key, wanted in ways.items() if wanted), *(["replicate"] if parallel.replicate else [])]
    if len(others) > 1:
        yield ConfigError(
            f"these settings of how gradients are summed exclude each other: {', '.join(others)}",
            where=", ".join(f"parallel.{key}" for key in others),
            fix="keep one of them",
        )


def _optimizer(config: Config, data: int) -> Iterator[ConfigError]:
    """Check optimizers and precisions that need whole matrices where matrices are cut."""
    parallel = config.parallel
    optimizer = find_optimizer(config.optimizer.name)
    shards = find_strategy(parallel.strategy).cuts_parameters and data > 1
    parts = "tensor" if parallel.tensor > 1 else "expert" if parallel.expert > 1 else None
    if optimizer.needs_whole_rows is not None and parts:
        yield ConfigError(
            optimizer.needs_whole_rows,
            where=f"optimizer.name, parallel.{parts}",
            fix=f"optimizer.name={LIGHT_OPTIMIZER}",
        )
    whole = simplest_strategy(lambda s: s.shards_gradients)  # with whole weights
    adapter = config.model.adapter
    if optimizer.has_one_rate and adapter is not None and adapter.also_trained_rate != 1.0:
        yield ConfigError(
            f"{optimizer.name} gives matrices between layers no learning rates of their own",
            where="model.adapter.also_trained_rate, optimizer.name",
            fix=f"optimizer.name={DEFAULT_OPTIMIZER}",
        )
    if optimizer.mixes_shards is not None and shards and config.determinism == "elastic":
        yield ConfigError(
            optimizer.mixes_shards,
            where="optimizer.name, parallel.strategy, determinism",
            fix=f"parallel.strategy={whole}, or determinism=run",
        )
    if optimizer.stays_with_shards is not None and shards and config.optimizer.offload:
        yield ConfigError(
            f"{optimizer.stays_with_shards}, so it cannot compute in host memory",
            where="optimizer.name, optimizer.offload",
            fix=f"optimizer.offload=false, or parallel.strategy={whole}",
        )
    yield from optimizer.problems(config, shards)
    if config.optimizer.offload and parallel.tensor > 1 and not shards:
        yield ConfigError(
            "moments in host memory belong to whole parameters, but tensor-parallel workers have parts of them",
            where="optimizer.offload, parallel.tensor",
            fix=f"optimizer.offload=false, or parallel.strategy={simplest_strategy(lambda s: s.offloads_itself)}",
        )
    if config.train.precision == "fp8" and parallel.tensor > 1:
        yield ConfigError(
            "fp8 scales an operand by its largest value, but each tensor-parallel worker has only a part of it",
            where="train.precision, parallel.tensor",
            fix="train.precision=bf16, or parallel.tensor=1",
        )


def _replication(config: Config, data: int) -> Iterator[ConfigError]:
    strategy = find_strategy(config.parallel.strategy)
    copies = config.parallel.replicate
    if copies is not None and (data % copies or (strategy.two_levels and copies in (1, data))):
        inner = [n for n in divisors(data) if n not in (1, data)] if strategy.two_levels else divisors(data)
        yield ConfigError(
            f"{data} data-parallel workers cannot be arranged as {copies} copies"
            + (" of at least two shards" if strategy.two_levels else ""),
            where="parallel.replicate",
            fix=f"parallel.replicate={nearest(copies, inner)}",
        )
    elif copies not in (None, 1) and not strategy.has_copies:
        *others, last = [f"'{spec.name}'" for spec in reversed(distinct_strategies()) if spec.has_copies]
        yield ConfigError(
            f"strategy '{strategy.name}' has one level; only {', '.join(others)} and {last} have copies",
            where="parallel.replicate, parallel.strategy",
            fix=f"leave parallel.replicate out, or parallel.strategy={simplest_strategy(lambda s: s.two_levels)}",
        )


def _model(config: Config) -> Iterator[ConfigError]:
    """Check that the shape of the model can be divided; that of a pretrained model is known only after it is read."""
    model = config.model
    parallel = config.parallel
    heads = model.kv_heads or model.heads
    layers = model.layers
    if heads and heads % parallel.tensor:
        yield ConfigError(
            f"{heads} key-value heads cannot be shared evenly by {parallel.tensor} tensor-parallel workers",
            where="parallel.tensor, model.kv_heads",
            fix=f"parallel.tensor={nearest(parallel.tensor, divisors(heads))}",
        )
    groups = ffn_groups(model.ffn_dim) if model.ffn_dim else 0
    if groups % parallel.tensor:
        yield ConfigError(
            f"the feed-forward width of {model.ffn_dim} has {groups} groups, which {parallel.tensor}"
            " tensor-parallel workers cannot share evenly",
            where="parallel.tensor, model.ffn_dim",
            fix=f"parallel.tensor={nearest(parallel.tensor, divisors(math.gcd(groups, heads or groups)))}",
        )
    if (model.vocab_size or 0) % parallel.tensor:
        yield ConfigError(
            f"a vocabulary of {model.vocab_size} rows cannot be shared evenly by {parallel.tensor} tensor-parallel"
            " workers",
            where="parallel.tensor, model.vocab_size",
            fix=f"model.vocab_size={padded_rows(model.vocab_size or 0, parallel.tensor)}",
        )
    yield from _compiled(config)
    yield from split_problems(config.parallel, config.train, layers)
    yield from _positions(config)


def _compiled(config: Config) -> Iterator[ConfigError]:
    """Check for cases in which torch.compile (tested: 2.13) fails on matrices that are cut between workers."""
    if not config.train.compile or config.parallel.tensor == 1:
        return
    if config.train.activation_checkpointing == "full":
        yield ConfigError(
            "torch.compile cannot recompute whole layers under tensor parallelism: it treats the mesh of the workers as"
            " a tensor to keep",
            where="train.compile, train.activation_checkpointing, parallel.tensor",
            fix="train.activation_checkpointing=selective, or train.compile=false",
        )
    if find_strategy(config.parallel.strategy).cuts_parameters:
        yield ConfigError(
            f"torch.compile computes wrong values if tensor parallelism and '{config.parallel.strategy}' both cut"
            " matrices",
            where="train.compile, parallel.strategy, parallel.tensor",
            fix=f"parallel.strategy={simplest_strategy(lambda s: s.shards_gradients)}, or train.compile=false",
        )


def row_parts(config: Config) -> int:
    """Return the number of equal parts into which the positions of every row are cut."""
    parallel = config.parallel
    # Each of several context-parallel workers has one part from the front of a row and one from its end.
    return parallel.context * parallel.tensor * (2 if parallel.context > 1 else 1)


def _positions(config: Config) -> Iterator[ConfigError]:
    """Check that rows of all lengths can be cut into equal parts."""
    parallel = config.parallel
    parts = row_parts(config)
    lengths = {"train.sequence_length": config.train.sequence_length}
    for number, stage in enumerate(config.data.mixture.stages):
        if stage.sequence_length:
            lengths[f"data.mixture.stages.{number}.sequence_length"] = stage.sequence_length
    for key, length in lengths.items():
        if length % parts:
            yield ConfigError(
                f"rows of {length} tokens cannot be cut into {parts} equal parts, as context {parallel.context}"
                f" x tensor {parallel.tensor} requires",
                where=f"{key}, parallel.context, parallel.tensor",
                fix=f"a length of {-(-length // parts) * parts}, or smaller degrees",
            )


def ffn_groups(ffn_dim: int) -> int:
    """Return the groups of rows in the first matrix of a feed-forward layer.

    It is the largest power of two up to 16 that divides the width. It depends on the shape alone, since it fixes the
    order of rows in checkpoints.
    """
    return math.gcd(ffn_dim, _FFN_GROUPS)


def padded_rows(vocab_size: int, tensor: int) -> int:
    """Round a vocabulary up to a number of rows that is a multiple of 64 and of the tensor-parallel degree."""
    multiple = math.lcm(64, tensor)
    return -(-vocab_size // multiple) * multiple
