"""The section `parallel`: how work is distributed over processes."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import PositiveInt, WithJsonSchema, model_validator

from headway.config.base import LocalPath, Section, conflict
from headway.config.strategies import AUTO, StrategyName

#: Whole gradients of more bytes are reduced in every micro-batch unless the config says otherwise.
_WHOLE_GRADIENTS_BYTES = 2 * 2**30
#: Keys that take a range, with the key that its lower end is a value of.
_RANGES = {"workers": "min_workers", "machines": "min_machines"}
#: A number of workers, or a range of them, for editors.
_WORKERS = {
    "anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": r"^\s*0*[1-9]\d*\s*:\s*0*[1-9]\d*\s*$"}]
}


class ParallelConfig(Section):
    """How work is distributed over processes."""

    strategy: StrategyName = AUTO
    """What each data-parallel worker keeps: `ddp` a copy of everything; `zero1` a part of the moments; `zero2` also a
    part of the gradients; `zero3`, also called `fsdp`, also a part of the weights; `hsdp` like `fsdp`, but within
    groups (`replicate`); `deepspeed_zero1` to `deepspeed_zero3` by DeepSpeed ([deepspeed.md](deepspeed.md)). `auto`:
    `single` for one worker, `ddp` for more. Your own: `package.module:NAME`
    ([extending/strategy.md](extending/strategy.md))."""
    workers: Annotated[PositiveInt, WithJsonSchema(_WORKERS)] = 1
    """Worker processes on this machine (`--workers` on the command line); `1:8` is 8, with `min_workers: 1`."""
    min_workers: PositiveInt | None = None
    """Fewest workers with which the run continues while workers are lost ([supervision.md](supervision.md)); for
    `determinism: elastic`, or `off`."""
    machines: Annotated[PositiveInt, WithJsonSchema(_WORKERS)] = 1
    """Machines that train together, each with `workers` workers (`--machines`;
    [several-machines.md](several-machines.md)); `2:4` is 4, with `min_machines: 2`."""
    min_machines: PositiveInt | None = None
    """Fewest machines with which the run continues while others are lost, for `determinism: elastic`, or `off`; 1 when
    not given. With `determinism: run` all of them are waited for."""
    replicate: PositiveInt | None = None
    """Number of groups of workers that hold copies of each other. For `hsdp`, each group is a whole copy cut into
    shards (2 when not given); for `ddp`, gradients are summed within each group first, then between groups."""
    reduce_precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """With `ddp` and `zero1`: the type in which gradients travel between workers and are summed. Half precision halves
    the traffic and rounds the sum, so losses differ from those of one worker."""
    compression: Literal["none", "powersgd"] = "none"
    """With `ddp` and `zero1`: `powersgd` sends matrices as two thin factors (Vogels et al. 2019), for slow networks. It
    keeps the remainder outside of checkpoints, so it needs `determinism: off`."""
    powersgd_rank: PositiveInt = 4
    """Columns of a factor."""
    deepspeed_config: LocalPath | None = None
    """A DeepSpeed JSON with further settings of a `deepspeed_` strategy; it must not contradict this config."""
    reshard_after_forward: bool = True
    """With `zero3` and `hsdp`: free a layer's gathered weights between its forward and its backward pass. Keeping them
    saves a third of the communication."""
    reduce_every: Literal["auto", "micro_batch", "step"] = "auto"
    """With `zero3` and `hsdp`: when gradients are summed over workers. `micro_batch` keeps only this worker's shard of
    them while micro-batches accumulate; `step` keeps whole gradients, and sums them once. `auto`: `micro_batch` where
    whole gradients take more than 2 GiB. The order of additions, and so the bits, depend on it. `elastic` runs sum at
    the end of every lane instead."""
    prefetch: PositiveInt | None = None
    """With `zero3` and `hsdp`: gather weights this many layers ahead, at the cost of the memory of as many whole
    layers. PyTorch's default, one layer, when not given."""
    tensor: PositiveInt = 1
    """Tensor parallelism: number of workers that share every matrix, with activations cut by position between them."""
    context: PositiveInt = 1
    """Context parallelism: number of workers that share the positions of every row."""
    pipeline: PositiveInt = 1
    """Pipeline parallelism: number of workers that share the layers, each with a stage of consecutive ones."""
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """Order of the micro-batches of a lane. `gpipe`: all forward, then all backward; `1f1b`: backward as early as
    possible, which keeps fewer activations; `interleaved`: like `1f1b` with several stages per worker, for less idle
    time."""
    virtual_stages: PositiveInt | None = None
    """Stages per worker with `interleaved`; 2 when not given."""
    pipeline_split: list[PositiveInt] | None = None
    """Layers of each stage, e.g. `[7, 9, 9, 7]`; split evenly by FLOPs, with the output projection, when not given."""
    expert: PositiveInt = 1
    """Expert parallelism: number of workers that share the experts of a layer, each with an equal, consecutive part, to
    which tokens are sent ([mixture-of-experts.md](mixture-of-experts.md)). They are among the workers that share data,
    rows or matrices, not additional ones."""
    threads: PositiveInt | Literal["auto"] = "auto"
    """CPU threads per worker. `auto`: cores / workers; with `elastic`, cores / lanes, since bits can depend on it.
    Affinity and control groups say how many cores there are, and `OMP_NUM_THREADS` is an upper limit."""
    timeout_seconds: PositiveInt = 600
    """A collective that takes longer ends the attempt."""
    nccl_profile: Literal["auto", "none", "ethernet", "infiniband", "roce", "nvlink"] = "auto"
    """NCCL's environment variables for workers on GPUs, as `headway doctor` shows them; variables that you set win."""
    nccl_topology: str | None = None
    """File of each machine that describes its GPUs, switches and network cards to NCCL (`NCCL_TOPO_FILE`), where a
    virtual machine hides them."""

    def reduces_each_micro_batch(self, gradient_bytes: int) -> bool:
        """Return whether sharded strategies sum gradients in every micro-batch, given the bytes of whole gradients."""
        return self.reduce_every == "micro_batch" or (
            self.reduce_every == "auto" and gradient_bytes > _WHOLE_GRADIENTS_BYTES
        )

    @property
    def all_workers(self) -> int:
        """Workers of all machines."""
        return self.workers * self.machines

    @model_validator(mode="before")
    @classmethod
    def _parse_ranges(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = dict(values)
        for key, least in _RANGES.items():
            if not (isinstance(values.get(key), str) and ":" in values[key]):
                continue
            fewest, _, most = values[key].partition(":")
            if not (fewest.strip().isdecimal() and most.strip().isdecimal()):
                text = f"'{values[key]}' is not a range of {key}; write the fewest and the most, for example 1:8"
                raise conflict(text, key)
            values.update({key: most, least: fewest})
        return values

    @model_validator(mode="after")
    def _check_ranges(self) -> Self:
        for key, least in _RANGES.items():
            fewest = getattr(self, least)
            if fewest is not None and fewest > getattr(self, key):
                raise conflict(f"{least} ({fewest}) is more than {key}", least, key)
        if self.machines > 1 and self.min_workers not in (None, self.workers):
            text = "on several machines the number of workers per machine is fixed; machines come and go as a whole"
            raise conflict(text, "min_workers", "machines")
        return self
