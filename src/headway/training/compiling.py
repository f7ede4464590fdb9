"""torch.compile: how, and for `train.compile=auto` whether it pays, measured once on one layer and remembered.

Code that is compiled rounds differently, so whether a run is compiled is a part of it: the first attempt decides, and
checkpoints keep it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
from torch import nn

from headway.config import Config
from headway.core.console import notice, warning
from headway.core.files import fingerprint, user_cache, write_json
from headway.core.foreign import read_json_object
from headway.core.format import format_seconds
from headway.core.heartbeat import Phase, beat
from headway.models.attention import Positions, rotary_tables
from headway.models.layer import Layer
from headway.models.shape import Shape
from headway.parallel.world import synchronize
from headway.telemetry.arithmetic import onednn_multiplies_fp32
from headway.telemetry.hardware import cpu_kind, device_name
from headway.training.compiler_start import start_compiler
from headway.training.precision import apply_precision, autocast

#: A run whose layers take less time than this altogether is not worth a try, which takes about half a minute.
_LEAST_SECONDS = 300.0
#: A layer is computed so often each way; the fastest counts, since others may be at work here too.
_ROUNDS = 7
#: Layouts of batches, stages and evaluation have code of their own; PyTorch's limit is for code that never settles.
_MOST_SHAPES = 64


@dataclass(frozen=True)
class Gain:
    """What compiling does to one layer."""

    eager_seconds: float
    """Forward and backward of a micro-batch."""
    compiled_seconds: float
    compile_seconds: float
    """Once, until the code is there."""

    def pays(self, layers: int) -> bool:
        """Whether it takes less time than it saves in so many layers."""
        return (self.eager_seconds - self.compiled_seconds) * layers > self.compile_seconds


def compile_model(config: Config, model: nn.Module) -> None:
    """Let a model compute with code that is compiled when it is first used.

    Shapes are not made variable, since the code for one must not depend on which others have come before, or a run
    that goes on would not have the bits of one that was never stopped. More shapes than anybody has are refused instead
    of computed without compiling.
    """
    from torch._dynamo import config as dynamo

    dynamo.recompile_limit = _MOST_SHAPES
    dynamo.fail_on_recompile_limit_hit = True
    if hasattr(dynamo, "invalidate_compile_context_weakrefs"):  # of the backend that is ours, whatever others there are
        dynamo.invalidate_compile_context_weakrefs = True
    device = next(model.parameters()).device
    start_compiler(device.type)
    _tell_when_compiling()
    _keep_little(device)
    if config.parallel.tensor > 1:
        # Between layers the residual stream is cut by position, which PyTorch (2.13) cannot give back to eager code.
        nn.Module.compile(model, dynamic=False)
    else:
        model.compile(dynamic=False)


def _keep_little(device: torch.device) -> None:
    """Let the backward pass on a CPU compute again what it can from what is kept anyway: what comes out of a norm or of
    SiLU, and weights in half precision. That takes no time that can be measured, and saves a third of the activations.
    """
    if device.type == "cpu":
        from torch._functorch import config as partitioner

        partitioner.ban_recompute_materialized_backward = False


@cache
def _tell_when_compiling() -> None:
    """Let the watchdog know: a shape that is new in the middle of a run takes as long as the first one, and no hang."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(lambda *_: beat(Phase.START))
    callback_handler.register_end_callback(lambda *_: beat(Phase.COMPUTE))


def compiling_pays(config: Config, device: torch.device, rows: int, micro_batches: int) -> bool:
    """Whether this process would train faster compiled, with what that costs counted.

    Figures are kept in the user's cache, by all that they depend on.

    Args:
        config: Of the native decoder, complete.
        rows: Of a micro-batch.
        micro_batches: That this process computes in the whole run.
    """
    shape, file = Shape.of(config.model), user_cache() / "compile.json"
    key, known = _key(config, device, rows), _read(file)
    layers = shape.layers * micro_batches
    if key in known:
        gain = Gain(**known[key])
    else:
        try:
            trial = _Trial(config, shape, device, rows)
            estimate = trial.eager_seconds() * layers
            if estimate < _LEAST_SECONDS:
                notice(f"not compiled: the layers take {format_seconds(estimate)} in all, so trying it does not pay")
                return False
            notice(
                "train.compile=auto: trying with one layer what torch.compile gains; once for this machine and shape"
            )
            gain = trial.measure()
        except Exception as error:  # of the compiler, whatever it is; or a whole layer does not fit beside the run's
            what = next(iter(str(error).strip().splitlines()), "no message")
            warning(f"not compiled: {type(error).__name__}: {what}")
            return False
        _keep(file, {**known, key: asdict(gain)})
    change = f"{gain.eager_seconds * 1e3:.1f} ms, compiled {gain.compiled_seconds * 1e3:.1f} ms"
    pays = gain.pays(layers)
    notice(f"{'compiled' if pays else 'not compiled'}: a layer takes {change} ({file})")
    return pays


class _Trial:
    """One layer with a micro-batch of the run."""

    def __init__(self, config: Config, shape: Shape, device: torch.device, rows: int) -> None:
        self.config, self.device = config, device
        length = config.train.sequence_length
        self.layer = Layer(config.model, shape, shape.layers - 1).to(device).train()
        self.layer.activation_checkpointing = config.train.activation_checkpointing
        apply_precision(config, self.layer, device)
        cos, sin = rotary_tables(length, shape.head_dim, config.model.rope_theta)
        self.positions = Positions(cos.to(device), sin.to(device), None, True)
        self.x_BTD = torch.randn(rows, length, shape.dim, device=device, requires_grad=True)

    def measure(self) -> Gain:
        """Both ways in turns."""
        start_compiler(self.device.type)
        _keep_little(self.device)
        compiled = torch.compile(self.layer.forward, dynamic=False)
        began = time.perf_counter()
        self._pass(compiled)
        compile_seconds = time.perf_counter() - began
        eager_times, compiled_times = [], []
        for _ in range(_ROUNDS):
            eager_times.append(self._timed(self.layer))
            compiled_times.append(self._timed(compiled))
        return Gain(min(eager_times), min(compiled_times), compile_seconds)

    def eager_seconds(self) -> float:
        """Of forward and backward, about."""
        return min(self._timed(self.layer) for _ in range(3))

    def _timed(self, layer: Callable[..., torch.Tensor]) -> float:
        began = time.perf_counter()
        self._pass(layer)
        return time.perf_counter() - began

    def _pass(self, layer: Callable[..., torch.Tensor]) -> None:
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):  # what training draws stays what it is
            with autocast(self.config.train.precision, self.device):
                loss = layer(self.x_BTD, self.positions, None).float().sum()
            loss.backward()
        synchronize(self.device)
        self.layer.zero_grad()
        self.x_BTD.grad = None


def _key(config: Config, device: torch.device, rows: int) -> str:
    train, no_matter = config.train, {"layers", "vocab_size", "preset", "from_pretrained"}
    return fingerprint(
        {
            "model": config.model.model_dump(mode="json", exclude=no_matter),
            "precision": train.precision,
            "rows": rows,
            "length": train.sequence_length,
            "checkpointing": train.activation_checkpointing,
            "threads": torch.get_num_threads(),
            "device": cpu_kind() if device.type == "cpu" else device_name(device),
            "determinism": config.determinism,
            "by_onednn": device.type == "cpu" and onednn_multiplies_fp32(),
            "torch": torch.__version__,
        }
    )


def _read(file: Path) -> dict[str, dict[str, float]]:
    """What is known; nothing where that cannot be read, since it can be measured again."""
    try:
        known = read_json_object(file)
        return {key: asdict(Gain(**value)) for key, value in known.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _keep(file: Path, known: dict[str, dict[str, float]]) -> None:
    with suppress(OSError):  # a home that cannot be written to
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, known)
