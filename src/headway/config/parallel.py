"""The section `parallel`: how the work is spread over processes."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import PositiveInt, WithJsonSchema, model_validator

from headway.config.base import LocalPath, Section, conflict

#: A number of workers, or a range of them, for editors.
_WORKERS = {
    "anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": r"^\s*0*[1-9]\d*\s*:\s*0*[1-9]\d*\s*$"}]
}


class ParallelConfig(Section):
    """How the work is spread over processes."""

    strategy: Literal[
        "auto",
        "single",
        "ddp",
        "zero1",
        "zero2",
        "zero3",
        "fsdp",
        "hsdp",
        "deepspeed_zero1",
        "deepspeed_zero2",
        "deepspeed_zero3",
    ] = "auto"
    """What workers that share the data keep: `ddp` a copy of everything; `zero1` a part of the moments; `zero2` of
    gradients too; `zero3`, also called `fsdp`, of weights too; `hsdp` the same within groups (`replicate`);
    `deepspeed_zero1` to `deepspeed_zero3` by DeepSpeed ([deepspeed.md](deepspeed.md)). `auto`: `single` for one worker,
    `ddp` for more."""
    workers: Annotated[PositiveInt, WithJsonSchema(_WORKERS)] = 1
    """Worker processes on this machine (`--workers` on the command line); `1:8` is 8, with `min_workers: 1`."""
    min_workers: PositiveInt | None = None
    """With as few the run goes on when workers are lost for good, until they are back
    ([supervision.md](supervision.md)); for `determinism: elastic`, or `off`."""
    replicate: PositiveInt | None = None
    """Groups of workers that hold copies of each other: for `hsdp` each is a whole copy cut into shards (2 when not
    given); for `ddp` gradients are summed within each group first, then between them."""
    reduce_precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """With `ddp` and `zero1`: the type in which gradients travel between workers and are summed. Half precision halves
    the traffic and rounds the sum; losses are no longer those of one worker."""
    compression: Literal["none", "powersgd"] = "none"
    """With `ddp` and `zero1`: `powersgd` sends matrices as two thin factors (Vogels et al. 2019), for slow networks. It
    keeps what they miss outside of checkpoints, so it takes `determinism: off`."""
    powersgd_rank: PositiveInt = 4
    """Columns of a factor."""
    deepspeed_config: LocalPath | None = None
    """A DeepSpeed JSON with what else a `deepspeed_` strategy shall know; it must not contradict this config."""
    reshard_after_forward: bool = True
    """With `zero3` and `hsdp`: let go of a layer's weights between its forward and its backward pass. Keeping them
    saves a third of the communication."""
    prefetch: PositiveInt | None = None
    """With `zero3` and `hsdp`: how many layers ahead weights are brought together, for the memory of as many whole
    layers. When not given one, as PyTorch does by itself."""
    tensor: PositiveInt = 1
    """Tensor parallelism: workers that share every matrix, with activations cut by position between them."""
    context: PositiveInt = 1
    """Context parallelism: workers that share the positions of every row."""
    pipeline: PositiveInt = 1
    """Pipeline parallelism: workers that share the layers, each with a stage of consecutive ones."""
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """Order of the micro-batches of a lane. `gpipe`: all forward, then all backward; `1f1b`: backward as early as
    possible, which keeps fewer activations; `interleaved`: that with several stages per worker, for less idling."""
    virtual_stages: PositiveInt | None = None
    """Stages per worker when `interleaved`; 2 when not given."""
    pipeline_split: list[PositiveInt] | None = None
    """Layers of each stage, e.g. `[7, 9, 9, 7]`; split evenly by FLOPs, with the output projection, when not given."""
    expert: PositiveInt = 1
    """Expert parallelism: workers that share the experts of a layer, each with an equal run of them, to which tokens
    travel ([mixture-of-experts.md](mixture-of-experts.md)). They are some of those that share data, rows or matrices,
    none beside them."""
    threads: PositiveInt | Literal["auto"] = "auto"
    """CPU threads per worker. `auto`: cores / workers; when `elastic` cores / lanes, since bits can depend on it."""
    timeout_seconds: PositiveInt = 600
    """A collective that takes longer ends the attempt."""
    nccl_profile: Literal["auto", "none", "ethernet", "infiniband", "roce", "nvlink"] = "auto"
    """NCCL's environment variables for workers on GPUs, as `headway doctor` shows them; yours are never overridden."""

    @model_validator(mode="before")
    @classmethod
    def _range_of_workers(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("workers"), str) and ":" in values["workers"]:
            fewest, _, most = values["workers"].partition(":")
            if not (fewest.strip().isdecimal() and most.strip().isdecimal()):
                text = f"'{values['workers']}' is no range of workers; write the fewest and the most, for example 1:8"
                raise conflict(text, "workers")
            return {**values, "workers": most, "min_workers": fewest}
        return values

    @model_validator(mode="after")
    def _fewest_are_not_more(self) -> Self:
        if self.min_workers is not None and self.min_workers > self.workers:
            raise conflict(f"min_workers ({self.min_workers}) is more than workers", "min_workers", "workers")
        return self
