"""torch.compile: how to compile a model, and for `train.compile=auto` whether that pays.

A trial with one layer decides, and its result is remembered. Compiled code rounds differently, so whether a run is
compiled is part of its state: the first attempt decides, and checkpoints keep the decision.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from headway.config import ModelConfig, TrainConfig
from headway.config.sections.parallel import ParallelConfig
from headway.core.console import notice, warning
from headway.core.coordination.heartbeat import Phase, beat
from headway.core.files.atomic import write_json
from headway.core.files.foreign import read_json_object
from headway.core.files.hashes import fingerprint
from headway.core.files.paths import user_cache
from headway.core.format import format_seconds
from headway.core.machine.processor import cpu_kind
from headway.models.layers.attention import Positions, attends_by_products
from headway.models.layers.layer import Layer
from headway.models.layers.rope import rotary_tables
from headway.models.shape import Shape
from headway.parallel.world import synchronize
from headway.telemetry.arithmetic import onednn_multiplies_fp32
from headway.telemetry.hardware import device_name
from headway.training.setup.compiler_start import start_compiler
from headway.training.setup.precision import apply_precision, autocast

Measured = TypeVar("Measured")

#: A run whose layers take less time than this in total is not worth a trial, which takes about half a minute.
_LEAST_SECONDS = 300.0
#: How often a layer is computed each way; the fastest counts, since other processes may use the machine too.
_ROUNDS = 7
#: Layouts of batches, stages and evaluation have code of their own; PyTorch's limit is for code that recompiles
#: endlessly.
_MOST_SHAPES = 64


@dataclass(frozen=True)
class Gain:
    """Measured effect of compiling one layer."""

    eager_seconds: float
    """Forward and backward of a micro-batch."""
    compiled_seconds: float
    compile_seconds: float
    """Time of the compilation, which happens once."""

    def pays(self, layers: int) -> bool:
        """Return whether compiling takes less time than it saves in so many layers."""
        return (self.eager_seconds - self.compiled_seconds) * layers > self.compile_seconds


def compile_model(parallel: ParallelConfig, model: nn.Module, mode: str | None = None) -> None:
    """Have a model compute with code that is compiled when it is first used.

    Shapes are static: the code for one shape must not depend on which shapes came before, or a resumed run would not
    have the bits of an uninterrupted one. More shapes than any run needs are an error, not a fallback to eager code.

    Args:
        parallel: How the model is distributed.
        model: The model.
        mode: Of torch.compile; its default when not given.
    """
    from torch._dynamo import config as dynamo

    dynamo.recompile_limit = _MOST_SHAPES
    dynamo.fail_on_recompile_limit_hit = True
    if hasattr(dynamo, "invalidate_compile_context_weakrefs"):  # of our backend only
        dynamo.invalidate_compile_context_weakrefs = True
    device = next(model.parameters()).device
    start_compiler(device.type)
    _report_compiling()
    _recompute_in_backward(device)
    if parallel.tensor > 1:
        # Between layers the residual stream is cut by position; PyTorch (2.13) cannot return such tensors to eager
        # code.
        nn.Module.compile(model, dynamic=False, mode=mode)
    else:
        model.compile(dynamic=False, mode=mode)


def _recompute_in_backward(device: torch.device) -> None:
    """Let the backward pass on a CPU recompute outputs of norms and of SiLU, and weights in half precision.

    It computes them from tensors that are kept anyway. That takes no measurable time, and saves a third of the
    activations.
    """
    if device.type == "cpu":
        from torch._functorch import config as partitioner

        partitioner.ban_recompute_materialized_backward = False


@cache
def _report_compiling() -> None:
    """Report compilation to the watchdog: a new shape in the middle of a run compiles as long as the first one."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(lambda *_: beat(Phase.START))
    callback_handler.register_end_callback(lambda *_: beat(Phase.COMPUTE))


def compiling_pays(
    model: ModelConfig, train: TrainConfig, determinism: str, device: torch.device, *, rows: int, micro_batches: int
) -> bool:
    """Return whether this process would train faster compiled, including the cost of compiling.

    Measurements are kept in the user's cache, keyed by all that they depend on.

    Args:
        model: Of the native decoder, complete.
        train: Of the run, resolved.
        rows: Rows of a micro-batch.
        micro_batches: Number of micro-batches that this process computes in the whole run.
    """
    shape = Shape.of(model)
    file = user_cache() / "compile.json"
    known = kept_measurements(file, Gain)
    key = _key(model, train, determinism, device, rows)
    layers = shape.layers * micro_batches
    if key in known:
        gain = known[key]
    else:
        try:
            trial = _Trial(model, train, device, rows)
            estimate = trial.eager_seconds() * layers
            if estimate < _LEAST_SECONDS:
                notice(f"not compiled: the layers take {format_seconds(estimate)} in all, so a trial does not pay")
                return False
            notice(
                "train.compile=auto: measuring with one layer what torch.compile gains, once for this machine and shape"
            )
            gain = trial.measure()
        except Exception as error:  # any error of the compiler; or a whole layer does not fit next to the run's tensors
            what = next(iter(str(error).strip().splitlines()), "no message")
            warning(f"not compiled: {type(error).__name__}: {what}")
            return False
        keep_measurements(file, {**known, key: gain})
    change = f"{gain.eager_seconds * 1e3:.1f} ms, compiled {gain.compiled_seconds * 1e3:.1f} ms"
    pays = gain.pays(layers)
    notice(f"{'compiled' if pays else 'not compiled'}: a layer takes {change} ({file})")
    return pays


class _Trial:
    """One layer with a micro-batch of the run's shape."""

    def __init__(self, model: ModelConfig, train: TrainConfig, device: torch.device, rows: int) -> None:
        self.precision = train.precision
        self.device = device
        shape = Shape.of(model)
        length = train.sequence_length
        self.layer = Layer(model, shape, shape.layers - 1).to(device).train()
        self.layer.activation_checkpointing = train.activation_checkpointing
        apply_precision(train, self.layer, device)
        cos, sin = rotary_tables(length, shape.rotary_dim, model.rope_theta)
        self.positions = Positions(cos.to(device), sin.to(device), None, True)
        self.x_BTD = torch.randn(rows, length, shape.dim, device=device, requires_grad=True)

    def measure(self) -> Gain:
        """Measure the layer eager and compiled, in turns."""
        start_compiler(self.device.type)
        _recompute_in_backward(self.device)
        compiled = torch.compile(self.layer.forward, dynamic=False)
        began = time.perf_counter()
        self._pass(compiled)
        compile_seconds = time.perf_counter() - began
        eager_times = []
        compiled_times = []
        for _ in range(_ROUNDS):
            eager_times.append(self._timed(self.layer))
            compiled_times.append(self._timed(compiled))
        return Gain(min(eager_times), min(compiled_times), compile_seconds)

    def eager_seconds(self) -> float:
        """Estimate the seconds of forward and backward."""
        return min(self._timed(self.layer) for _ in range(3))

    def _timed(self, layer: Callable[..., torch.Tensor]) -> float:
        began = time.perf_counter()
        self._pass(layer)
        return time.perf_counter() - began

    def _pass(self, layer: Callable[..., torch.Tensor]) -> None:
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):  # keeps the random state of training
            with autocast(self.precision, self.device):
                loss = layer(self.x_BTD, self.positions, None).float().sum()
            loss.backward()
        synchronize(self.device)
        self.layer.zero_grad()
        self.x_BTD.grad = None


def _key(model: ModelConfig, train: TrainConfig, determinism: str, device: torch.device, rows: int) -> str:
    irrelevant = {"layers", "vocab_size", "preset", "from_pretrained"}
    return fingerprint(
        {
            "model": model.model_dump(mode="json", exclude=irrelevant),
            "precision": train.precision,
            "rows": rows,
            "length": train.sequence_length,
            "checkpointing": train.activation_checkpointing,
            "threads": torch.get_num_threads(),
            "device": cpu_kind() if device.type == "cpu" else device_name(device),
            "determinism": determinism,
            "by_products": attends_by_products(),
            "by_onednn": device.type == "cpu" and onednn_multiplies_fp32(),
            "torch": torch.__version__,
        }
    )


def kept_measurements(file: Path, kind: Callable[..., Measured]) -> dict[str, Measured]:
    """Return the measurements in a file of the user's cache; none if it cannot be read: they can be made again."""
    try:
        return {key: kind(**value) for key, value in read_json_object(file).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def keep_measurements(file: Path, known: Mapping[str, Any]) -> None:
    """Write measurements, which are dataclasses, to a file of the user's cache, if it can be written."""
    with suppress(OSError):  # a home directory that is not writable
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {key: asdict(value) for key, value in known.items()})
