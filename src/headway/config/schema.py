"""The schema of a config. Its descriptions are the reference documentation.

Everything here is plain data. `Config.resolved` fills in values that follow from others (a model's shape from its
preset, steps from tokens). A resolved config is complete: running it again gives an identical run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    PositiveInt,
    PrivateAttr,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from headway.config.base import FUNCTION_PATTERN, LocalPath, Section, Share, conflict
from headway.config.checks.contradictions import combined, find_problems
from headway.config.checks.experts import resolved_balance, shape_problem
from headway.config.derived.batches import Batches, BatchStage, batch_quantity, batch_rows
from headway.config.derived.segments import Segment, batches_before
from headway.config.optimizers import DEFAULT_OPTIMIZER, OptimizerName, find_optimizer
from headway.config.sections.architecture import MambaConfig, RopeScaling, variation_problem
from headway.config.sections.benchmarks import BenchmarksConfig
from headway.config.sections.checkpoint import CheckpointConfig
from headway.config.sections.cost import BudgetConfig, CostConfig
from headway.config.sections.data import DataConfig, SourceConfig, named_sources
from headway.config.sections.early_stopping import EarlyStoppingConfig
from headway.config.sections.health import HealthConfig
from headway.config.sections.launch import LaunchConfig
from headway.config.sections.losses import DistillConfig
from headway.config.sections.parallel import ParallelConfig
from headway.config.sections.preemption import PreemptionConfig
from headway.config.sections.pretrained import AdapterConfig, PretrainedSource
from headway.config.sections.supervise import SuperviseConfig
from headway.config.sections.track import TrackConfig
from headway.config.shapes import SHAPES
from headway.config.units import SHARE_OR_INTERVAL, Interval, StepInterval, Tokens, share_or_interval, written
from headway.core.errors import ConfigError

#: Name of a run, and so of its folder.
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


class ModelConfig(Section):
    """The native decoder of the Llama family, or a pretrained model to continue."""

    preset: str | None = None
    """A named shape (`headway models` lists them); other keys of this section override it."""
    from_pretrained: PretrainedSource | None = None
    """A Hugging Face checkpoint to continue: a folder, or `hf://organisation/name@revision` on the Hub, which a run
    pins to a commit. Shape and initial weights come from it. A resumed run needs it too, and unchanged
    ([continue-a-model.md](continue-a-model.md))."""
    implementation: Literal["auto", "native", "transformers"] = "auto"
    """Code that computes a pretrained model. `native`: the decoder of this package, for the families in
    [continue-a-model.md](continue-a-model.md). `transformers`: its class there. `auto`: `native` where it computes
    exactly this model and there is no adapter."""
    trust_remote_code: bool = False
    """Run code that comes with a pretrained model."""
    adapter: AdapterConfig | None = None
    """Train adapters instead of the weights of a pretrained model."""
    neftune_alpha: Annotated[float, Field(ge=0.0)] = 0.0
    """Uniform noise in training on the embeddings of a pretrained model that transformers computes: at most this over
    the root of a row's number of values (NEFTune, Jain et al. 2023)."""
    router_aux_weight: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the load-balancing loss of the routers of a pretrained model that transformers computes (Fedus et al.
    2021, equation 4). It is computed for each row over all layers, and averaged over the items of the global batch. The
    native decoder has `balance_loss`."""
    vocab_size: PositiveInt | None = None
    """Rows of the embedding; the token store's vocabulary rounded up to a multiple of 64 when not given."""
    dim: PositiveInt | None = None
    """Width of the residual stream."""
    layers: PositiveInt | None = None
    """Number of decoder layers."""
    heads: PositiveInt | None = None
    """Query heads."""
    kv_heads: PositiveInt | None = None
    """Key and value heads (grouped-query attention); `heads` when not given."""
    head_dim: PositiveInt | None = None
    """Width of a head; `dim / heads` when not given."""
    ffn_dim: PositiveInt | None = None
    """Inner width of the feed-forward layer."""
    activation: Literal["swiglu", "geglu", "relu2"] = "swiglu"
    """Activation of the feed-forward layer: `swiglu` and `geglu` have a gate (Shazeer 2020, equation 6), of which
    `geglu` takes the GELU in its tanh form (Gemma); `relu2` is the squared ReLU, without one (So et al. 2021, section
    4.1)."""
    ffn_bias: bool = False
    """Biases in the feed-forward layer."""
    experts: PositiveInt | None = None
    """Routed experts of a layer, which replace its feed-forward layer
    ([mixture-of-experts.md](mixture-of-experts.md))."""
    experts_per_token: PositiveInt = 2
    """Routed experts that compute each token (top-k)."""
    normalize_router_weights: bool = True
    """Divide the weights of a token's experts by their sum, so that they add up to 1."""
    router_scale: Annotated[float, Field(gt=0.0)] = 1.0
    """Factor of the output of routed experts (DeepSeek-V3, section 2.1.2; `routed_scaling_factor`)."""
    shared_experts: Annotated[int, Field(ge=0)] = 0
    """Additional experts that compute every token (Dai et al. 2024, section 3.2)."""
    expert_ffn_dim: PositiveInt | None = None
    """Inner width of an expert; `ffn_dim` when not given."""
    dense_layers: Annotated[int, Field(ge=0)] = 0
    """First layers that keep a feed-forward layer of width `ffn_dim`."""
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    """How logits of the router become scores: over all experts, or for each alone (DeepSeek-V3, section 2.1.2)."""
    router_z_loss: Annotated[float, Field(ge=0.0)] = 0.001
    """Weight of the router z-loss, a token's squared log-sum-exp (Zoph et al. 2022, equation 5), in each layer."""
    balance_bias_rate: Annotated[float, Field(ge=0.0)] | None = None
    """Balances loads by a bias of each expert that moves by this much per step and affects only the choice of experts
    (Wang et al. 2024). When not given, 0.001 with sigmoid scores and 0 with softmax."""
    balance_loss: Annotated[float, Field(ge=0.0)] | None = None
    """Weight of the load-balancing loss (Fedus et al. 2021, equation 4) in each layer. When not given, 0.01 with
    softmax scores and 0 with sigmoid."""
    max_sequence_length: PositiveInt = 2048
    """Longest sequence that the model is meant for."""
    rope_theta: Annotated[float, Field(gt=0.0)] = 10_000.0
    """Base of the rotary embedding (Su et al. 2021, section 3.2.2)."""
    rope_scaling: RopeScaling | None = None
    """Rotary frequencies for longer sequences."""
    rotary_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """Share of a head that the rotary embedding turns, its first elements; 0: none, so positions are not encoded."""
    local_rope_theta: Annotated[float, Field(gt=0.0)] | None = None
    """Base of the rotary embedding in the sliding layers of `attention_pattern`, whose frequencies are then not scaled
    (Gemma 3); as in all layers when not given."""
    norm: Literal["rmsnorm", "rmsnorm1p", "layernorm1p"] = "rmsnorm"
    """`rmsnorm1p` (Gemma) and `layernorm1p` (Nemotron, a LayerNorm) have a gain of 1 plus their weight, so that weight
    decay pulls it to 1."""
    pre_norms: bool = True
    """Normalise the inputs of attention and feed-forward layers; false with `post_norms` alone (OLMo 2)."""
    post_norms: bool = False
    """Normalise the outputs of attention and feed-forward layers, before they are added (GLM-4, Gemma, OLMo 2)."""
    norm_eps: Annotated[float, Field(ge=0.0)] = 1e-5
    """Added to the mean square in norms."""
    qk_norm: bool = False
    """RMSNorm on queries and keys (Dehghani et al. 2023, section 2.2; as in Qwen 3)."""
    qk_norm_over: Literal["head", "projection"] = "head"
    """Part that `qk_norm` normalises: each head, or all heads of a token together (OLMo 2)."""
    qkv_bias: bool = False
    """Biases of queries, keys and values (Qwen 2)."""
    output_bias: bool = False
    """Bias of the output of attention."""
    attention_scale: Annotated[float, Field(gt=0.0)] | None = None
    """Factor of attention scores; 1 / sqrt(width of a head) when not given."""
    attention_softcap: Annotated[float, Field(gt=0.0)] | None = None
    """Attention scores s become c tanh(s / c), with this c (Gemma 2)."""
    attention_pattern: Annotated[str, Field(pattern=r"^[FSN]+$")] | None = None
    """A letter per layer for its attention: `F` full, `S` sliding (`sliding_window`), `N` full without rotary
    embedding; when not given, the same in all layers."""
    layer_pattern: Annotated[str, Field(pattern=r"^[M*-]+$")] | None = None
    """A letter per layer, each of which is then one block with one norm: `M` Mamba-2, `*` attention, `-` feed-forward
    ([continue-a-model.md](continue-a-model.md#hybrid-models))."""
    mamba: MambaConfig | None = None
    """Sizes of the Mamba-2 layers of `layer_pattern`."""
    tie_embeddings: bool = False
    """Use the embedding matrix as the output projection too."""
    embedding_scale: Annotated[float, Field(gt=0.0)] = 1.0
    """Factor of embeddings (Granite; Gemma has sqrt(dim))."""
    residual_scale: Annotated[float, Field(gt=0.0)] = 1.0
    """Factor of the outputs of attention and feed-forward layers, when they are added (Granite)."""
    logit_divisor: Annotated[float, Field(gt=0.0)] = 1.0
    """Divides the logits (Granite)."""
    logit_softcap: Annotated[float, Field(gt=0.0)] | None = None
    """Logits z become c tanh(z / c), with this c (Gemma 2)."""
    sliding_window: PositiveInt | None = None
    """Attend only to this many last positions (Mistral); full causal attention when not given. With
    `attention_pattern`, in its sliding layers."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout on the outputs of attention and feed-forward layers."""
    init_std: Annotated[float, Field(gt=0.0)] = 0.02
    """Standard deviation of the initial weights; output projections of a layer get 1/sqrt(2 * layers) of it."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not values.get("preset"):
            return values
        name = str(values["preset"]).lower()
        if name not in SHAPES:
            raise conflict(f"unknown model preset '{name}'; known ones: {', '.join(SHAPES)}", "preset")
        return {
            **SHAPES[name],
            **{key: value for key, value in values.items() if value is not None},
            "preset": name,
        }

    @model_validator(mode="after")
    def _check_shape(self) -> Self:
        if self.from_pretrained is not None:
            return self
        missing = [key for key in ("dim", "layers", "heads", "ffn_dim") if getattr(self, key) is None]
        if missing:
            raise conflict(f"set a preset (for example 'preset: 4m'), or also: {', '.join(missing)}")
        assert self.dim and self.heads
        if self.head_dim is None and self.dim % self.heads:
            raise conflict(f"dim {self.dim} is not divisible by heads {self.heads}; set head_dim", "dim", "heads")
        if self.heads % (self.kv_heads or self.heads):
            text = f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}"
            raise conflict(text, "heads", "kv_heads")
        if (self.head_dim or self.dim // self.heads) % 2:
            raise conflict("the width of a head must be even for the rotary embedding", "head_dim", "dim", "heads")
        for problem in (shape_problem(self), variation_problem(self)):
            if problem is not None:
                raise conflict(problem[0], *problem[1])
        return self


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

    steps: PositiveInt | None = None
    """Optimizer steps. Give this or `tokens`."""
    tokens: Tokens | None = None
    """Training tokens, e.g. `2B`; rounded up to whole steps."""
    sequence_length: PositiveInt = 1024
    """Tokens in one row."""
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
    """Arithmetic of matrix products; weights and moments are always kept in fp32. `tf32`: GPUs from Ampere on; `fp16`:
    with dynamic loss scaling; `fp8`: through torchao, on GPUs from Ada and Hopper on. `auto`: bf16 on a GPU, and on a
    CPU that multiplies faster in it, otherwise fp32; chosen when a run begins, and kept."""
    compile: bool | Literal["auto"] = False
    """Run the model through torch.compile. `auto`: if that saves more time than it takes, measured once on one layer
    and kept in the checkpoint ([performance.md](performance.md))."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """`full` recomputes each layer in the backward pass: least memory, about a third more compute. `selective` keeps
    the outputs of attention and of every second matrix product, and recomputes the rest."""
    max_grad_norm: Annotated[float, Field(gt=0.0)] | None = 1.0
    """Clip gradients to this global norm."""
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

    def after(self, before: tuple[Batches, int] | None) -> TrainConfig:
        """Adapt this section to a run whose first steps had other batches.

        An amount in tokens counts the tokens of all steps, so it becomes a different number of steps than in a new run.

        Args:
            before: The batches of the first steps, and the step where they end; None if there are none.
        """
        train, asked = self.model_copy(), self._asked
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
        if self.steps is not None and self.tokens is not None:
            raise conflict("give steps or tokens, not both", "steps", "tokens")
        micro_batch = self.micro_batch if isinstance(self.micro_batch, int) else 1
        for rows in sizes:
            if rows % micro_batch:
                text = f"global_batch ({rows} rows) is not divisible by micro_batch ({micro_batch})"
                raise conflict(text, "global_batch" if rows == sizes[-1] else "batch_ramp", "micro_batch")
        return self


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
    eps: Annotated[float, Field(gt=0.0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    """Decoupled decay of matrices; norms and biases are not decayed."""
    offload: bool = False
    """Keep moments in host memory and compute updates there: slower steps, and no optimizer memory on the GPU."""

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
    """Trackers that the run's metrics are sent to, by a process of its own."""
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

    @property
    def run_directory(self) -> Path:
        """Folder of the run."""
        return self.runs / self.name

    def resolved(self, trains: bool = True) -> Config:
        """Complete the config: tokens become steps, the store gets its path from the name, and so on.

        Args:
            trains: The config must give the length of training; otherwise `train.steps` may stay open.

        Raises:
            ConfigError: parts of the config contradict each other, or neither steps nor tokens is given.
        """
        problems = find_problems(self, trains)
        if problems:
            raise combined(problems)
        train = self.train
        model = self.model
        if model.from_pretrained is None:
            assert model.dim and model.heads
            follows = {
                "kv_heads": model.kv_heads or model.heads,
                "head_dim": model.head_dim or model.dim // model.heads,
                **resolved_balance(model),
            }
            # These keys stay unset: if `override` changes the shape, other values follow from it.
            model = ModelConfig.model_construct(set(model.model_fields_set), **{**dict(model), **follows})
        store = Path(str(self.data.store).replace("{name}", self.name))
        data = self.data.model_copy(update={"sources": named_sources(self.data.sources), "store": store})
        return self.model_copy(update={"train": train.in_whole_steps(), "model": model, "data": data})
