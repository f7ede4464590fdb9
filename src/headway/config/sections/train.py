"""The section `train`: length of training, batch sizes and arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, PrivateAttr, WithJsonSchema, field_validator, model_validator

from headway.config.base import Section, conflict
from headway.config.batches import Batches, BatchStage, batch_quantity, batch_rows
from headway.config.sections.early_stopping import EarlyStoppingConfig
from headway.config.units import Interval, Length, Steps, Tokens, written
from headway.core.types import Checkpointing


@dataclass(frozen=True)
class _Asked:
    """Values that were given in tokens before they became steps. Equality of configs ignores them."""

    is_known: bool = field(default=False, compare=False)
    tokens: int | None = field(default=None, compare=False)
    batch_ramp: tuple[BatchStage, ...] = field(default=(), compare=False)
    steps: int | None = field(default=None, compare=False)
    """The steps that `tokens` became."""
    made: list[BatchStage] | None = field(default=None, compare=False)
    """The ramp in steps that `batch_ramp` became. If a config now has another ramp, it was given since."""


class TrainConfig(Section):
    """Length of training, batch sizes and arithmetic."""

    steps: Steps | None = None
    """Optimizer steps, e.g. `1000` or `2k`. Give this, `tokens` or `epochs`."""
    tokens: Tokens | None = None
    """Training tokens, e.g. `2B`; rounded up to whole steps."""
    epochs: Annotated[float, Field(gt=0.0)] | None = None
    """Passes over the training rows, rounded up to whole steps, which are counted when the data are prepared. With
    weights of sources it is the length only: a source repeats by its weight, up to its `data.sources.max_epochs`."""
    sequence_length: Length = 1024
    """Tokens in one row, e.g. `1024` or `2k`, which is 2048."""
    global_batch: Annotated[int | str, WithJsonSchema(written("rows", "tokens"))] = 32
    """Rows in one optimizer step, over all workers; or tokens: `64Ki tokens`."""
    batch_ramp: list[BatchStage] = []
    """Smaller batches at the beginning, e.g. `[{global_batch: 64, until: 1B tokens}]`
    ([batch-ramp.md](batch-ramp.md))."""
    micro_batch: PositiveInt | Literal["auto"] | None = None
    """Rows in one forward pass; the largest divisor of a lane up to 8 when not given. `auto`: the largest that fits
    into memory, found by trial at the start and kept in the checkpoint."""
    trial_step: bool | None = None
    """Compute one gradient of the largest shape before the first step, so that a lack of memory shows at once; on GPUs
    when not given."""
    lanes: PositiveInt | Literal["auto"] = "auto"
    """Data-parallel units of a step: workers share lanes. `auto`: the number of workers, or up to 8 when `elastic`."""
    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp8", "auto"] = "fp32"
    """Arithmetic of matrix products; `weights` says how weights are kept. `tf32`: GPUs from Ampere on; `fp16`:
    with dynamic loss scaling; `fp8`: through torchao, on GPUs from Ada and Hopper on. `auto`: bf16 on a GPU, and on a
    CPU that multiplies faster in it or keeps `weights` in bf16, otherwise fp32; chosen when a run begins, and kept."""
    weights: Literal["fp32", "bf16", "bf16_stochastic"] = "fp32"
    """How weights are kept. `bf16`: the device has them in bf16 and nothing else of their size; host memory has fp32
    masters, moments and summed gradients, and AdamW runs there ([bf16-weights.md](bf16-weights.md)).
    `bf16_stochastic`: the same without masters; updated weights and moments are in bf16, and rounded at random."""
    compile: bool | Literal["auto", "max-autotune", "max-autotune-no-cudagraphs"] = False
    """Run the model through torch.compile. `auto`: if that saves more time than it takes, measured once on one layer
    and kept in the checkpoint ([performance.md](performance.md)). The others are its modes that time kernels and take
    the fastest, which can differ from start to start: for `determinism: off`."""
    activation_checkpointing: Checkpointing = "none"
    """`full` recomputes each layer in the backward pass: little memory, about a third more compute. `selective` keeps
    the outputs of attention and of every second matrix product, and recomputes the rest. `offload` is `full`, with the
    inputs of layers kept in host memory."""
    max_grad_norm: Annotated[float, Field(gt=0.0)] | None = 1.0
    """Clip gradients to this global norm."""
    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Keep an exponential moving average of the weights with this decay, such as 0.999, in every checkpoint (tensors
    `ema.*`); evaluations use it. None is kept when null."""
    early_stopping: EarlyStoppingConfig | None = None
    """End training when the validation loss no longer falls; never when null."""
    skip_limit: PositiveInt = 10
    """Steps with a non-finite loss or gradient are skipped; this many in a row end the run."""
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    """`auto` takes the first available one of cuda, mps, cpu."""

    @field_validator("global_batch", mode="before")
    @classmethod
    def _check_quantity(cls, value: Any) -> Any:
        return batch_quantity(value)

    @property
    def resolved_steps(self) -> int:
        """The steps of a resolved config, which has some."""
        assert self.steps is not None, "the config is resolved"
        return self.steps

    @property
    def compiles(self) -> bool:
        """Whether the model is compiled, whatever that saves."""
        return self.compile not in (False, "auto")

    @property
    def compile_mode(self) -> str | None:
        """The mode of torch.compile; None for its own default."""
        return None if isinstance(self.compile, bool) or self.compile == "auto" else self.compile

    @property
    def global_batch_rows(self) -> int:
        """Rows in one optimizer step, after the ramp if there is one; no step has more."""
        return batch_rows(self.global_batch, self.sequence_length)

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one optimizer step, after the ramp if there is one."""
        return self.global_batch_rows * self.sequence_length

    _before: tuple[Batches, int] | None = PrivateAttr(default=None)
    # The batches of earlier segments and the step where they end: `Config.segments`.
    _asked: _Asked = PrivateAttr(default_factory=lambda: _Asked())

    @property
    def batches(self) -> Batches:
        """The rows of every step."""
        return self._batches_of(self.batch_ramp)

    def in_whole_steps(self) -> TrainConfig:
        """Convert everything that is given in tokens to steps. The tokens are remembered for `after`."""
        return self._in_whole_steps(self.tokens, self.batch_ramp)

    def over(self, rows: int) -> TrainConfig:
        """Convert `epochs` over so many training rows to steps; a section without them is returned unchanged."""
        if self.epochs is None:
            return self
        tokens = math.ceil(self.epochs * rows) * self.sequence_length
        return self.model_copy(update={"epochs": None, "tokens": tokens}).in_whole_steps()

    def after(self, before: tuple[Batches, int] | None) -> TrainConfig:
        """Adapt this section to a run whose first steps had other batches.

        An amount in tokens counts the tokens of all steps, so it becomes a different number of steps than in a new run.

        Args:
            before: The batches of the first steps, and the step where they end; None if there are none.
        """
        train = self.model_copy()
        asked = self._asked
        train._before = before
        if not asked.is_known or (asked.steps, asked.made) != (self.steps, self.batch_ramp):
            return train  # given in steps, originally or since
        return train._in_whole_steps(asked.tokens, asked.batch_ramp)

    def asked(self) -> dict[str, Any] | None:
        """Return the values that were given in tokens, as JSON for `asking`; None if there are none."""
        asked = self._asked
        if not asked.is_known:
            return None
        return {"tokens": asked.tokens, "batch_ramp": [stage.model_dump(mode="json") for stage in asked.batch_ramp]}

    def asking(self, asked: Mapping[str, Any] | None) -> TrainConfig:
        """Restore the values that `asked` returned, after a round trip through JSON; None means given in steps."""
        train = self.model_copy()
        train._asked = _Asked()
        if asked is not None:
            ramp = tuple(BatchStage.model_validate(stage) for stage in asked["batch_ramp"])
            train._asked = _Asked(True, asked["tokens"], ramp, self.steps, self.batch_ramp)
        return train

    def _batches_of(self, ramp: Sequence[BatchStage]) -> Batches:
        before, begins = self._before or (None, 0)
        return Batches.planned(ramp, self.global_batch_rows, self.sequence_length, before, begins)

    def _in_whole_steps(self, tokens: int | None, ramp: Sequence[BatchStage]) -> TrainConfig:
        batches = self._batches_of(ramp)
        steps = self.steps if tokens is None else batches.steps_for(tokens)
        # Stages that end in an earlier segment may end at one step, which a ramp in steps may not.
        made = [
            BatchStage(global_batch=rows, until=Interval(end, "steps"))
            for (start, rows), (end, _) in pairwise(batches.parts)
            if start < end
        ]
        length = {"steps": steps, "tokens": None, "global_batch": self.global_batch_rows, "batch_ramp": made}
        train = self.model_copy(update=length)
        if tokens is not None or any(stage.until.unit == "tokens" for stage in ramp):
            train._asked = _Asked(True, tokens, tuple(ramp), steps, made)
        return train

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        sizes = self.batches.sizes
        given = [key for key in ("steps", "tokens", "epochs") if getattr(self, key) is not None]
        if len(given) > 1:
            raise conflict(f"{' and '.join(given)} each give the length of training; keep one", *given)
        micro_batch = self.micro_batch if isinstance(self.micro_batch, int) else 1
        for rows in sizes:
            if rows % micro_batch:
                text = f"global_batch ({rows} rows) is not divisible by micro_batch ({micro_batch})"
                raise conflict(text, "global_batch" if rows == sizes[-1] else "batch_ramp", "micro_batch")
        return self
