"""The schema of a config: all sections together. Descriptions are the reference documentation.

Everything here is plain data; `resolving` fills in what follows from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, PositiveInt, field_validator, model_validator

from headway.config.base import FUNCTION_PATTERN, LocalPath, Section, Share, conflict
from headway.config.optimizers import DEFAULT_OPTIMIZER, OptimizerName, find_optimizer
from headway.config.sections.benchmarks import BenchmarksConfig
from headway.config.sections.checkpoint import CheckpointConfig
from headway.config.sections.cost import BudgetConfig, CostConfig
from headway.config.sections.data import DataConfig, SourceConfig, stored_names
from headway.config.sections.health import HealthConfig
from headway.config.sections.launch import LaunchConfig
from headway.config.sections.losses import DistillConfig
from headway.config.sections.model import ModelConfig
from headway.config.sections.parallel import ParallelConfig
from headway.config.sections.preemption import PreemptionConfig
from headway.config.sections.segments import PartRows, Segment, SegmentSource, batches_before
from headway.config.sections.supervise import SuperviseConfig
from headway.config.sections.task import TaskConfig
from headway.config.sections.track import TrackConfig
from headway.config.sections.train import TrainConfig
from headway.config.units import SHARE_OR_INTERVAL, Interval, StepInterval, share_or_interval
from headway.core.credentials.secrets import redact_values
from headway.core.errors import ConfigError

#: Name of a run, and so of its folder.
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


#: Share of a moment that is kept from step to step; with 1, nothing would be learnt.
DecayRate = Annotated[float, Field(ge=0.0, lt=1.0)]


class OptimizerConfig(Section):
    """The update of weights from gradients ([optimizers.md](optimizers.md)); decoupled weight decay on matrices
    only."""

    name: OptimizerName = DEFAULT_OPTIMIZER
    """`adamw` (Loshchilov & Hutter 2019). `muon` (Jordan et al. 2024): orthogonalised momentum for matrices between
    layers, AdamW for the rest. `lion` (Chen et al. 2023): signs of momentum; use a learning rate 3 to 10 times smaller
    and as much more decay. `adafactor` (Shazeer & Stern 2018): second moments by row and column. `adamw8bit`: moments
    in 8 bits, through torchao. Your own: `package.module:NAME` ([extending/optimizer.md](extending/optimizer.md))."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 3e-4
    """Peak learning rate; for `adafactor` relative to the root mean square of each parameter."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moments. For Lion, of its moment in the direction and over steps; then
    (0.9, 0.99) when not given."""
    momentum: DecayRate = 0.95
    """Decay rate of Muon's momentum."""
    projections: Literal["apart", "whole"] | None = None
    """How Muon and Adafactor update a matrix that holds several projections, such as queries, keys and values: `apart`,
    as if each had a matrix of its own, or `whole`, as one. `apart` with these two when null; a run that was begun
    without this key has `whole`."""
    eps: Annotated[float, Field(gt=0.0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    """Decoupled decay of matrices; norms and biases are not decayed."""
    offload: bool = False
    """Keep moments in host memory and compute updates there: slower steps, and no optimizer memory on the GPU."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """Type of AdamW's moments in host memory; `bf16` only where `train.weights` is not fp32, with half the memory.
    `bf16_stochastic` has them in bf16 in any case."""

    def completed(self) -> OptimizerConfig:
        """Return the section with the values of a new run in place of null."""
        if self.projections is not None or not find_optimizer(self.name).reads_matrices:
            return self
        values = {**dict(self), "projections": "apart"}
        return OptimizerConfig.model_construct(set(self.model_fields_set), **values)  # unset for `override`

    @model_validator(mode="after")
    def _fill_betas(self) -> Self:
        if "betas" not in self.model_fields_set:
            with suppress(ConfigError):  # `find_problems` says why a spec cannot be found
                # The key stays unset, since another optimizer must not inherit it.
                self.__dict__["betas"] = find_optimizer(self.name).betas or self.betas
        return self


# The share comes first, so that 1.0 stays the whole run; in the other order it would be read as one step.
ShareOrInterval = Annotated[Share | Interval, Field(union_mode="left_to_right"), SHARE_OR_INTERVAL]


class ScheduleConfig(Section):
    """Learning rate as a function of the step."""

    name: Literal["cosine", "linear", "wsd", "rsqrt", "constant", "infinite"] = "cosine"
    """After the warm-up: `cosine` half a cosine; `linear` a straight line; `wsd` stable, then a linear decay; `rsqrt`
    falls with the inverse square root of the step, whatever the number of steps; `constant` the peak.
    `infinite`: a cool-down by half a cosine, a constant part, and an exponential decay at the end (Ibrahim et al.
    2024)."""
    warmup: ShareOrInterval = 0.02
    """Linear warm-up: a share of all steps, or `500 steps`, `1B tokens`."""
    decay: ShareOrInterval = 0.2
    """Length of the final decay of `wsd` and `infinite`: a share of all steps, or an amount."""
    start_ratio: Share = 0.0
    """Where the warm-up begins, as a share of the peak."""
    cooldown: ShareOrInterval = 0.3
    """With `infinite`: how long the rate falls from the peak to `constant_ratio` of it."""
    constant_ratio: Share = 0.5
    """With `infinite`: the rate between cool-down and final decay, as a share of the peak."""
    min_ratio: Share = 0.1
    """Final learning rate as a share of the peak; for `rsqrt`, the least one."""
    unit: Literal["steps", "tokens"] = "steps"
    """Unit of progress and of shares of it; with `train.batch_ramp` the two differ."""
    batch_scaling: Literal["none", "sqrt"] = "none"
    """`sqrt`: while `train.batch_ramp` has smaller batches, the rate is smaller by the square root of their share of
    `train.global_batch` (the rule for adaptive optimizers of Malladi et al. 2022)."""

    @field_validator("warmup", "decay", "cooldown", mode="before")
    @classmethod
    def _parse_lengths(cls, value: Any) -> Any:
        return share_or_interval(value)

    @model_validator(mode="after")
    def _check_ratios(self) -> Self:
        if self.name == "infinite" and not 0 < self.min_ratio <= self.constant_ratio:
            text = "the final decay of `infinite` is exponential, from constant_ratio to a min_ratio between 0 and it"
            raise conflict(text, "min_ratio", "constant_ratio")
        return self


class EvaluationConfig(Section):
    """Loss on the validation split."""

    every: StepInterval | None = None
    """How often during training, in steps or tokens; the end of training is always evaluated."""
    rows: PositiveInt | None = 256
    """Validation rows per evaluation, at most; all when null."""
    benchmarks: BenchmarksConfig | None = None
    """Tasks of lm-eval on the model; none when null."""


class TelemetryConfig(Section):
    """Records and reports."""

    log_every: PositiveInt = 10
    """Steps between lines on the screen; `metrics.jsonl` has every step."""
    state_hash_every: Annotated[int, Field(ge=0)] = 0
    """Record the SHA-256 of every state tensor every so many steps (0: never); `headway verify` compares them."""
    communication_every: Annotated[int, Field(ge=0)] = 0
    """Measure the collectives of one step in so many on the first worker: their time, their rate, and the share of the
    step in which nothing was computed beside them (0: never). PyTorch's profiler slows such a step down."""
    report: bool = True
    """Write `report.html` to the run directory when training has finished."""
    usd_per_hour: Annotated[float, Field(ge=0.0)] | None = None
    """Older name of `cost.usd_per_hour`."""
    alert: Annotated[str, Field(min_length=1)] | None = None
    """Shell command that is run for every warning during training and for every failed attempt. It gets a line of JSON
    on standard input (`run`, `what`, `host`, `time`), for example for `curl -s -d @- https://...`. A token comes from
    the environment: `$NAME`."""
    git_diff: Literal["local", "none", "full"] = "local"
    """Where uncommitted changes of the code are kept. `local`: in a file of the attempt; records, reports and
    checkpoints have its hash and the names of changed files. `full`: also in records, reports and checkpoints, without
    text that looks like a credential. `none`: nowhere."""


@dataclass(frozen=True)
class RowSettings:
    """The values of a config that determine the rows of its steps."""

    seed: int
    data: DataConfig
    train: TrainConfig
    segments: Sequence[Segment]
    """The parts of a run that was changed; empty for one that was not."""
    sections: Sequence[tuple[DataConfig, TrainConfig]]
    """The sections of each segment that determine its rows."""


class Config(Section):
    """One training run."""

    name: str = Field(default="run", pattern=NAME_PATTERN)
    """Name of the run; its folder is `<runs>/<name>`."""
    runs: LocalPath = Path("runs")
    """Folder that holds run directories."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of everything random: initial weights, order of the data, dropout."""
    determinism: Literal["off", "run", "elastic"] = "run"
    """`off`: fastest. `run`: equal bits on an equal layout, even after kills. `elastic`: on any number of workers."""
    task: TaskConfig | None = None
    """A task of your own, as `package.module:function`, in place of a language model ([own-task.md](own-task.md))."""
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig(preset="4m")
    loss: Annotated[str, Field(pattern=FUNCTION_PATTERN)] | None = None
    """Your own loss, as `package.module:function`, importable from the working directory; the cross-entropy when null
    ([extending/loss.md](extending/loss.md))."""
    distill: DistillConfig | None = None
    """A teacher to learn from; none when null."""
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    supervise: SuperviseConfig = SuperviseConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    health: HealthConfig = HealthConfig()
    preemption: PreemptionConfig = PreemptionConfig()
    launch: LaunchConfig = LaunchConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    cost: CostConfig = CostConfig()
    budget: BudgetConfig = BudgetConfig()
    track: list[TrackConfig] = []
    """Trackers that the run's metrics are sent to, by a separate process."""
    callbacks: list[Annotated[str, Field(pattern=FUNCTION_PATTERN)]] = []
    """Your own callbacks, as `package.module:Class`, importable from the working directory. They are created without
    arguments and called between steps, on every worker ([extending/callback.md](extending/callback.md))."""
    segments: list[Segment] = []
    """The parts of a run that was changed (`--accept-changes`), each with what determines its rows; the last one is
    current. Written by Headway, never by hand ([changing-a-run.md](changing-a-run.md))."""

    @field_validator("track", mode="before")
    @classmethod
    def _accept_one_tracker(cls, value: Any) -> Any:
        return [value] if isinstance(value, str | dict) else value

    @field_validator("task", mode="before")
    @classmethod
    def _accept_name_of_function(cls, value: Any) -> Any:
        return {"function": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _pass_segments_to_batches(self) -> Self:
        self.train._before = batches_before(self.segments)
        return self

    def with_segments(self, segments: Sequence[Segment]) -> Config:
        """Return this config as the last of these segments of a run; without segments, as that of an unchanged run.

        Amounts in tokens count over all segments.
        """
        train = self.train.after(batches_before(segments))
        return self.model_copy(update={"segments": list(segments), "train": train})

    def begin_segment(
        self,
        first_step: int,
        data: str,
        rows: PartRows,
        *,
        shards: Sequence[Mapping[str, Sequence[str]]] = (),
        new_epoch: bool = False,
        changes: Sequence[str] = (),
    ) -> Segment:
        """Make the segment that this config begins, resolved.

        Args:
            first_step: First step of the segment.
            data: Fingerprint of the data.
            rows: Rows of each part of the data, by source and row length.
            shards: Names of the shards of every part but the last.
            new_epoch: The segment begins a new epoch of all data.
            changes: Descriptions of the accepted changes.
        """
        train = self.train
        assert train.steps is not None, "the config is resolved"
        names = stored_names(self.data.sources)
        sources = [
            SegmentSource(name=name, weight=source.weight, max_epochs=source.max_epochs)
            for name, source in zip(names, self.data.sources, strict=True)
        ]
        stored = {str(source.name): name for name, source in zip(names, self.data.sources, strict=True)}
        stages = [
            stage.model_copy(update={"weights": {stored.get(name, name): w for name, w in stage.weights.items()}})
            if stage.weights is not None
            else stage
            for stage in self.data.mixture.stages
        ]
        return Segment(
            first_step=first_step,
            seed=self.seed,
            steps=train.steps,
            sequence_length=train.sequence_length,
            global_batch=train.global_batch_rows,
            batch_ramp=train.batch_ramp,
            packing=self.data.packing,
            document_mask=self.data.document_mask,
            sources=sources,
            mixture=self.data.mixture.model_copy(update={"stages": stages}),
            data=data,
            rows={name: {length: list(parts) for length, parts in of.items()} for name, of in rows.items()},
            shards=[{name: list(files) for name, files in part.items()} for part in shards],
            new_epoch=new_epoch,
            changes=list(changes),
        )

    @property
    def segment_sections(self) -> list[tuple[DataConfig, TrainConfig]]:
        """The sections of each segment that determine its rows."""
        configs = map(self.of_segment, range(len(self.segments)))
        return [(one.data, one.train) for one in configs]

    @property
    def row_settings(self) -> RowSettings:
        """The values that determine the rows of its steps."""
        return RowSettings(self.seed, self.data, self.train, self.segments, self.segment_sections)

    def of_segment(self, number: int) -> Config:
        """Return this config with the settings of one of its segments for everything that determines rows."""
        segment = self.segments[number]
        length = {
            "steps": segment.steps,
            "tokens": None,
            "sequence_length": segment.sequence_length,
            "global_batch": segment.global_batch,
            "batch_ramp": segment.batch_ramp,
        }
        sources = [SourceConfig(path=source.name, **dict(source)) for source in segment.sources]
        rows = {"packing": segment.packing, "document_mask": segment.document_mask, "mixture": segment.mixture}
        data = self.data.model_copy(update={"sources": sources, **rows})
        # A segment is in steps already, by its own batches.
        changed = {"seed": segment.seed, "train": self.train.asking(None).model_copy(update=length), "data": data}
        return self.model_copy(update=changed).with_segments(self.segments[: number + 1])

    def __repr__(self) -> str:
        """Return what differs from the defaults, as YAML."""
        values = redact_values(self.model_dump(mode="json", exclude_defaults=True))
        if self.model.preset is not None:
            usual = ModelConfig(preset=self.model.preset).model_dump(mode="json")
            model = self.model.model_dump(mode="json")
            other = {key: value for key, value in model.items() if value != usual[key]}
            values["model"] = {"preset": self.model.preset, **other}
        return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120))

    __str__ = __repr__

    @property
    def logits_key(self) -> str | None:
        """The key by which the loss is computed from whole logits; None for the cross-entropy."""
        if self.distill is not None:
            return "distill"
        return "loss" if self.loss is not None else None

    @property
    def usd_per_hour(self) -> float | None:
        """Price of all machines that the config gives as a number, by its present or its old key."""
        price = self.cost.usd_per_hour
        return self.telemetry.usd_per_hour if price is None else price

    @property
    def run_directory(self) -> Path:
        """Folder of the run."""
        return self.runs / self.name
