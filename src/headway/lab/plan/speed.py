"""The duration of a step: a roofline of computation, memory traffic and communication, with every assumption listed.

Williams et al. 2009 ("Roofline"): a kernel's time is set by its bottleneck, arithmetic or memory. Products are bound by
arithmetic; all other kernels and the optimizer are bound by memory. Collectives take the time of their bytes through
the narrowest link of a ring (Thakur, Rabenseifner & Gropp 2005, section 4), minus what the backward pass can hide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil, log2

from headway.config import Config, ModelConfig
from headway.config.derived.pipeline import stages_per_worker
from headway.config.optimizers import FP32_BYTES
from headway.config.sections.architecture import FEED_FORWARD, pattern_layers
from headway.config.strategies import StrategySpec, distinct_strategies
from headway.lab.plan.accelerators import Machines
from headway.lab.plan.activations import Activations, element_bytes, fills_tiles, has_grouped_kernel, masked_pairs
from headway.lab.plan.deepspeed import ZeroSettings, live_weights
from headway.lab.plan.host import BYTES_PER_UPDATE
from headway.lab.plan.layout import Layout
from headway.lab.plan.stages import Stage, pipeline_stages
from headway.models.facts import attended_keys, count_parameters, flops_per_token, scan_flops
from headway.models.shape import Shape

#: FLOPs of attention's backward pass over those of its forward pass: kernels compute the scores again (Dao 2023,
#: "FlashAttention-2", section 4.1).
ATTENTION_BACKWARD = 2.5
#: Speed of kernels that take a mask over that of those that do not.
MASKED_SHARE = 0.7
#: Share of the memory's bandwidth that kernels between products reach.
BANDWIDTH_SHARE = 0.8
#: Bytes per second that the workers of a machine move together while they update in host memory.
HOST_BANDWIDTH = 100e9
#: Share of a link's bandwidth that collectives of many megabytes reach.
LINK_SHARE = 0.8
#: Number of times that saved activations are read or written, forward and backward, eager and compiled (fused).
PASSES_EAGER = 6
PASSES_COMPILED = 3
#: Bytes moved per logit by the loss, forward and backward.
BYTES_PER_LOGIT = 40
#: Bytes moved per parameter by one micro-batch: casts, gradients.
BYTES_PER_MICRO_BATCH = 24
#: Bytes moved per element of an operand that is rounded to 8 bits, eager and compiled; and roundings per operand in a
#: forward and backward pass (torchao 0.18.0, `float8/float8_linear.py`).
BYTES_PER_ROUNDED_EAGER = 33
BYTES_PER_ROUNDED_COMPILED = 7
ROUNDINGS = 2
#: Latency of one stage of a collective in seconds, within a machine and between machines.
LATENCY_INSIDE_SECONDS = 5e-6
LATENCY_BETWEEN_SECONDS = 15e-6
#: Share of the forward and backward pass that is backward.
_BACKWARD = 2 / 3

#: Least and most of the planned throughput to expect, from four of five of the published cases.
RANGE = (0.8, 1.2)


def _listed(wanted: Callable[[StrategySpec], bool]) -> str:
    return " and ".join(spec.name for spec in distinct_strategies() if wanted(spec))


_ASSUMPTIONS = (
    f"kernels between products reach {BANDWIDTH_SHARE:.0%} of the memory's bandwidth, collectives {LINK_SHARE:.0%} of"
    " their link",
    f"attention's backward pass computes {ATTENTION_BACKWARD:g} times its forward pass; kernels that take a mask are"
    f" {MASKED_SHARE:.0%} as fast",
    f"saved activations are moved {PASSES_EAGER} times, {PASSES_COMPILED} times when compiled; a logit costs"
    f" {BYTES_PER_LOGIT} bytes, a parameter {BYTES_PER_MICRO_BATCH} per micro-batch and {BYTES_PER_UPDATE} per update",
    f"gradients of {_listed(lambda s: s.overlaps_backward and s.keeps_whole_gradients)} hide behind the last backward"
    f" pass; units of {_listed(lambda s: s.shards_weights and not s.two_levels)} behind the layer before; nothing else"
    " hides",
    "with fp8 linear layers between embedding and projection have its peak, all else that of bf16; operands are rounded"
    f" {ROUNDINGS} times, {BYTES_PER_ROUNDED_EAGER} bytes per element, {BYTES_PER_ROUNDED_COMPILED} when compiled",
    "data, checkpoints, evaluation and restarts cost no time",
    f"four of five published speeds are between {RANGE[0]} and {RANGE[1]} times what is planned"
    " (benchmarks/plan/published.py); the plan was not compared with a GPU here",
)


def host_bandwidth(machines: Machines) -> float:
    """Return the bytes per second of updates in host memory, for all workers of a machine."""
    return machines.host_bytes_per_second or HOST_BANDWIDTH


def assumptions(machines: Machines) -> list[str]:
    """Return in words what every speed assumes."""
    card = machines.accelerator
    shares = f"products reach {card.product_share:.0%} of the dense peak, attention {card.attention_share:.0%}"
    measured = "as headway doctor measured" if machines.host_bytes_per_second else "not measured"
    rate = f"{host_bandwidth(machines) / 1e9:.3g} GB/s for all workers of a machine, {measured}"
    return [shares, *_ASSUMPTIONS, f"updates in host memory move {rate}"]


@dataclass(frozen=True)
class Speed:
    """The time of one optimizer step, in seconds."""

    products_seconds: float
    attention_seconds: float
    other_kernels_seconds: float
    communication_seconds: float
    """Time of communication that is not hidden."""
    bubble_seconds: float
    """Time in which pipeline stages wait for each other."""
    tokens_per_step: int
    model_flops_per_second: float
    """Peak of all workers, as MFU counts it."""
    flops_per_token: float

    @property
    def step_seconds(self) -> float:
        """Time of the whole step."""
        computed = self.products_seconds + self.attention_seconds + self.other_kernels_seconds
        return computed + self.communication_seconds + self.bubble_seconds

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all workers."""
        return self.tokens_per_step / self.step_seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation (Chowdhery et al. 2022, appendix B)."""
        return self.tokens_per_second * self.flops_per_token / self.model_flops_per_second


def plan_speed(config: Config, model: ModelConfig, layout: Layout, machines: Machines) -> Speed | None:
    """Estimate the time of a step; None if a figure of the accelerator or its links is unknown, or if transformers
    computes the model, whose kernels are not known."""
    accelerator = machines.accelerator
    precision = config.train.precision
    peak = accelerator.peak_flops(precision)
    bandwidth = accelerator.bandwidth_gb_per_second
    others = accelerator.peak_flops("bf16") if precision == "fp8" else peak
    if peak is None or others is None or bandwidth is None or model.implementation == "transformers":
        return None
    if layout.mesh.size > 1 and machines.link_bytes_per_second() is None:
        return None
    workers = layout.mesh.size
    length = config.train.sequence_length
    per_token = flops_per_token(model, length)
    tokens = config.train.tokens_per_step
    own = tokens / workers
    computed = _product_flops_per_token(model, layout, precision)
    rounded = _rounded_flops_per_token(model, layout) if precision == "fp8" else 0.0
    products = own * (rounded / peak + (computed - rounded) / others) / accelerator.product_share
    is_masked = masked_pairs(config, model, layout.mesh.cp) > 0
    # Context-parallel workers mask only the end of what their queries see, a window all but its pairs.
    pairs = _attention_flops_per_token(model, length, layout, every_pair=is_masked and layout.mesh.cp == 1)
    attention = own * pairs / others / accelerator.attention_share / (MASKED_SHARE if is_masked else 1)
    stage = pipeline_stages(config, model, layout)[-1]
    moved = _moved_bytes(config, model, layout, stage)
    kernels = moved / (bandwidth * 1e9 * BANDWIDTH_SHARE)
    passes = products + attention + kernels
    host = host_bandwidth(machines) / machines.per_node
    kernels += _update_bytes(layout, stage) / (host if config.optimizer.offload else bandwidth * 1e9 * BANDWIDTH_SHARE)
    sent = _Collectives(config, Shape.of(model), layout, machines, stage).exposed_seconds(passes / layout.micro_batches)
    # The pipeline runs empty at the end of each lane; with several stages a worker waits for parts of micro-batches.
    parts = stages_per_worker(config.parallel) * layout.micro_batches // layout.lanes
    bubble = passes * (layout.mesh.pp - 1) / parts
    return Speed(products, attention, kernels, sent, bubble, tokens, workers * peak, per_token)


@dataclass(frozen=True)
class _Product:
    """A linear layer, or several alike, summed over the decoder's layers."""

    parameters: float
    """Parameters that a token uses, in all layers."""
    inner: float
    """Elements read and written per token, in all layers."""
    again: float
    """Share that `selective` checkpointing recomputes (`lab/plan/activations.py`)."""
    rounds: bool
    """Whether precision "fp8" computes it in 8 bits."""


def _products(model: ModelConfig, precision: str) -> Iterator[_Product]:
    shape = Shape.of(model)
    width = shape.heads * shape.head_dim
    mixtures = shape.layers - shape.dense_layers
    attending = len(shape.attention_layers)
    branches = 1 if model.activation == "relu2" else 2
    dense = len(pattern_layers(shape.pattern, FEED_FORWARD)) if shape.pattern else shape.dense_layers

    def linear(layers: int, rows: int, columns: int, again: float) -> _Product:
        sides = (rows, columns)
        return _Product(layers * rows * columns, layers * (rows + columns), again, fills_tiles(sides))

    yield linear(attending, shape.dim, width + 2 * shape.kv_heads * shape.head_dim, 0.0)
    yield linear(attending, width, shape.dim, 1.0)
    yield linear(dense, shape.dim, branches * shape.ffn_dim, 0.0)
    yield linear(dense, shape.ffn_dim, shape.dim, 1.0)
    if (mamba := model.mamba) is not None:
        layers = len(shape.mamba_layers)
        yield linear(layers, shape.dim, mamba.projected, 0.0)
        yield linear(layers, mamba.width, shape.dim, 1.0)
    if mixtures:
        again = 1.0 if has_grouped_kernel(shape, precision, "cuda") else 0.5
        experts = 3 * shape.experts_per_token * shape.dim * shape.expert_ffn_dim
        yield _Product(mixtures * experts, 0.0, again, rounds=False)
    if mixtures and shape.shared_ffn_dim:
        yield linear(mixtures, shape.dim, 2 * shape.shared_ffn_dim, 1.0)
        yield linear(mixtures, shape.shared_ffn_dim, shape.dim, 0.0)


def _attention_flops_per_token(model: ModelConfig, length: int, layout: Layout, *, every_pair: bool) -> float:
    """Count the FLOPs of attention computed per token: of pairs that causal mask and window leave, or of every pair.

    Those of the state spaces of Mamba-2 layers are added.
    """
    shape = Shape.of(model)
    windows = [attended_keys(model, index, length) for index in shape.attention_layers]
    # Average over the row: its first positions see less than a window.
    attended = sum(length if every_pair and w < length else w - w**2 / (2 * length) for w in windows)
    forward = 4 * shape.heads * shape.head_dim * attended
    again = 1 if layout.checkpointing in ("full", "offload") else 0
    scans = len(shape.mamba_layers) * scan_flops(model, length) / 3
    return forward * (1 + again + ATTENTION_BACKWARD) + scans * (3 + again)


def _product_flops_per_token(model: ModelConfig, layout: Layout, precision: str) -> float:
    """Count the FLOPs of products actually computed per token, including recomputation."""
    shape = Shape.of(model)
    counts = count_parameters(model)
    layers = 6 * (counts.active - counts.embedding)
    # The forward pass is a third of the FLOPs.
    selective = sum(2 * product.parameters * product.again for product in _products(model, precision))
    again = {"none": 0.0, "selective": selective, "full": layers / 3, "offload": layers / 3}
    return layers + again[layout.checkpointing] + 6 * shape.vocab_size * shape.dim


def _rounded_flops_per_token(model: ModelConfig, layout: Layout) -> float:
    """Count the FLOPs per token that are computed in 8 bits."""
    again = {"none": 0.0, "full": 1.0, "offload": 1.0}
    return sum(
        product.parameters * (6 + 2 * again.get(layout.checkpointing, product.again))
        for product in _products(model, "fp8")
        if product.rounds
    )


def _update_bytes(layout: Layout, stage: Stage) -> float:
    parameters = stage.all / FP32_BYTES
    divided = layout.strategy.divides_update or layout.strategy.is_deepspeed
    owners = layout.mesh.data if divided else 1
    share = layout.mesh.dp_shard if layout.strategy.cuts_parameters else owners
    return BYTES_PER_UPDATE * parameters / share


def _moved_bytes(config: Config, model: ModelConfig, layout: Layout, stage: Stage) -> float:
    """Estimate the memory traffic of one accelerator in the passes of one step, without that of products."""
    length = config.train.sequence_length // layout.mesh.cp
    sizes = Activations.of_layout(config, model, layout, "cuda")
    passes = PASSES_COMPILED if config.train.compiles else PASSES_EAGER
    if layout.checkpointing != "none":
        passes += passes // 3
    logits = layout.micro_batch * length * Shape.of(model).vocab_size / layout.mesh.tp / layout.mesh.pp
    micro_batch = (
        passes * (sizes.dense.saved * (stage.layers - stage.mixtures) + sizes.mixture.saved * stage.mixtures)
        + BYTES_PER_LOGIT * logits
        + BYTES_PER_MICRO_BATCH * stage.all / FP32_BYTES
        + (_rounded_bytes(config, model, layout) if config.train.precision == "fp8" else 0)
    )
    return layout.micro_batches * micro_batch


def _rounded_bytes(config: Config, model: ModelConfig, layout: Layout) -> float:
    """Estimate the bytes that one micro-batch moves to round inputs, weights and output gradients to 8 bits."""
    tokens = layout.micro_batch * config.train.sequence_length // layout.mesh.cp
    rounded = [product for product in _products(model, "fp8") if product.rounds]
    elements = sum(tokens * product.inner + product.parameters for product in rounded) / layout.mesh.pp
    each = BYTES_PER_ROUNDED_COMPILED if config.train.compiles else BYTES_PER_ROUNDED_EAGER
    return ROUNDINGS * each * elements


@dataclass(frozen=True)
class _Group:
    """Workers that take part in a collective."""

    size: int
    per_node: int
    """Workers of the group on one machine."""


@dataclass(frozen=True)
class _Collectives:
    """The communication of one step."""

    config: Config
    shape: Shape
    layout: Layout
    machines: Machines
    stage: Stage

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.config.train.sequence_length

    @property
    def element(self) -> int:
        """Bytes of an element in matrix products."""
        return element_bytes(self.config.train.precision)

    def exposed_seconds(self, micro_batch_seconds: float) -> float:
        """Estimate the time that is not hidden, given the time of one micro-batch's passes."""
        layout = self.layout
        stage = self.stage
        mesh = layout.mesh
        strategy = layout.strategy
        count = layout.micro_batches
        backward = micro_batch_seconds * _BACKWARD
        data = self._group(mesh.data, mesh.cp * mesh.tp)
        shards = self._group(mesh.dp_shard, mesh.cp * mesh.tp)
        copies = self._group(mesh.dp_replicate, mesh.cp * mesh.tp * mesh.dp_shard)
        total = count * (self._tensor() + self._context() + self._between_stages())
        if layout.elastic and not strategy.cuts_parameters:
            total += 2 * self._ring(stage.all, data, 1)
        elif strategy.keeps_whole_gradients and strategy.sums_gradients:
            hidden = backward if strategy.overlaps_backward else 0.0
            total += max(0.0, self._sum(stage.all, data) - hidden)
        elif strategy.shards_gradients and strategy.divides_update:
            hidden = backward if strategy.overlaps_backward else 0.0
            total += count * max(0.0, self._ring(stage.all, data, 1) - hidden)
        if strategy.divides_update:
            total += self._ring(stage.all, data, 1)
        if strategy.cuts_parameters:
            total += self._sharded(shards, copies, micro_batch_seconds)
        if strategy.is_deepspeed:
            total += self._deepspeed(data, micro_batch_seconds)
        return total

    def _deepspeed(self, data: _Group, micro_batch_seconds: float) -> float:
        """Estimate DeepSpeed's communication, in fp32 (see `lab/plan/deepspeed.py` for its source).

        `stage_1_and_2.py`: `average_tensor` sums a bucket for all workers, though each needs only its own part; stage 1
        does so once per step, stage 2 in each micro-batch. It overlaps the backward pass only with `overlap_comm`.
        Weights are sent after the update. `stage3.py`: weights are gathered for the forward pass, and, unless they stay
        gathered, again for the backward pass; gradients are summed for their owners.
        """
        stage = self.stage
        count = self.layout.micro_batches
        zero = ZeroSettings.of(self.config, self.layout.mesh.data)
        pieces = ceil(stage.all / FP32_BYTES / zero.reduce_bucket)
        forward = micro_batch_seconds * (1 - _BACKWARD)
        backward = micro_batch_seconds * _BACKWARD
        if zero.stage < 3:
            summed = (1 if zero.reduces_to_owner else 2) * self._ring(stage.all, data, pieces)
            shown = max(0.0, summed - backward) if zero.overlaps else summed
            return (1 if zero.stage == 1 else count) * shown + self._ring(stage.all, data, 1)
        small = sum(size for size in stage.bytes.values() if size <= FP32_BYTES * zero.persistence)
        live = live_weights(zero, stage, self.layout, gloo=False)
        # Embedding and projection are needed first in a pass; nothing can hide them.
        first = self._ring(stage.root, data, 2)
        gathered = self._ring(max(0, stage.in_layers - small), data, len(stage.bytes))
        again = self._ring(max(0, stage.all - max(small, live.loss)), data, len(stage.bytes))
        summed = self._ring(stage.all, data, pieces)
        if zero.overlaps:
            shown = first + max(0.0, gathered - forward) + max(0.0, again + summed - backward)
        else:
            shown = first + gathered + again + summed
        return count * shown + self._ring(small, data, 1)

    def _sharded(self, shards: _Group, copies: _Group, micro_batch_seconds: float) -> float:
        layout = self.layout
        stage = self.stage
        units = stage.layers
        layers = self._ring(self._gathered(stage.in_layers), shards, units)
        # The root is the first unit of both passes; nothing can hide it.
        root = self._ring(stage.root, shards, 1)
        sent = self._ring(stage.in_layers, shards, units)
        forward = micro_batch_seconds * (1 - _BACKWARD)
        backward = micro_batch_seconds * _BACKWARD
        again = layers if layout.reshard_after_forward else 0.0
        sends = sent + 2 * self._ring(stage.all // layout.mesh.dp_shard, copies, units)
        sums = 1
        if layout.elastic:
            sums = layout.lanes
        elif self.config.parallel.reduces_each_micro_batch(stage.all):
            sums = layout.micro_batches
        gathers = layout.micro_batches * (max(0.0, layers - forward) + root)
        without_sum = (layout.micro_batches - sums) * max(0.0, again - backward)
        return gathers + without_sum + sums * (max(0.0, again + sends - backward) + root)

    def _gathered(self, count: int) -> int:
        """Return the bytes of layer weights when gathered: under autocast in half precision.

        fp8 layers cast their weights themselves.
        """
        element = FP32_BYTES if self.config.train.precision == "fp8" else self.element
        return count * element // FP32_BYTES

    def _tensor(self) -> float:
        """Estimate gathers before and sums after attention and feed-forward, forward and backward."""
        mesh = self.layout.mesh
        tokens = self.layout.micro_batch * self.length // mesh.cp
        group = self._group(mesh.tp, 1)
        return 8 * self.stage.layers * self._ring(tokens * self.shape.dim * self.element, group, 1)

    def _context(self) -> float:
        """Estimate the exchange of keys and values of the whole row, forward and backward."""
        mesh = self.layout.mesh
        keys = 2 * self.layout.micro_batch * self.length * self.shape.kv_heads * self.shape.head_dim // mesh.tp
        return 2 * self.stage.layers * self._ring(keys * self.element, self._group(mesh.cp, mesh.tp), 1)

    def _between_stages(self) -> float:
        """Estimate the transfers of the residual stream, in fp32, to and from the next stage."""
        mesh = self.layout.mesh
        if mesh.pp == 1:
            return 0.0
        stream = FP32_BYTES * self.layout.micro_batch * self.length * self.shape.dim // (mesh.cp * mesh.tp)
        stride = mesh.size // mesh.pp
        network = self.machines.network_bytes_per_second() if stride >= self.machines.per_node else None
        bandwidth = network or self.machines.link_bytes_per_second()
        assert bandwidth is not None
        latency = LATENCY_INSIDE_SECONDS if network is None else LATENCY_BETWEEN_SECONDS
        return 2 * stages_per_worker(self.config.parallel) * (stream / (bandwidth * LINK_SHARE) + latency)

    def _group(self, size: int, stride: int) -> _Group:
        """Return the group of workers `stride` apart; workers of one machine have consecutive numbers."""
        return _Group(size, max(1, min(size, self.machines.per_node // stride)))

    def _sum(self, count: float, group: _Group) -> float:
        """Estimate the seconds to sum `count` bytes for all workers of a group.

        Between machines the library uses trees, in which each machine sends and receives every sum once (Sanders et al.
        2009, "Two-tree algorithms").
        """
        if group.size <= group.per_node or group.per_node == 1:
            return 2 * self._ring(count, group, 1)
        machines = _Group(group.size // group.per_node, 1)
        inside = _Group(group.per_node, group.per_node)
        return 2 * max(self._ring(count / group.per_node, machines, 1), self._ring(count, inside, 1))

    def _ring(self, count: float, group: _Group, pieces: int) -> float:
        """Estimate the seconds to all-gather or reduce-scatter `count` bytes in a number of pieces."""
        if group.size == 1:
            return 0.0
        link = self.machines.link_bytes_per_second()
        network = self.machines.network_bytes_per_second()
        assert link is not None
        inside = group.size <= group.per_node
        if inside or network is None:
            bandwidth = link
            latency = LATENCY_INSIDE_SECONDS
        else:
            # One ring per worker of the group on a machine, each through its own port.
            bandwidth = min(link, network * group.per_node) if group.per_node > 1 else network
            latency = LATENCY_BETWEEN_SECONDS
        seconds = count * (group.size - 1) / group.size / (bandwidth * LINK_SHARE)
        return seconds + pieces * latency * (1 + log2(group.size))
