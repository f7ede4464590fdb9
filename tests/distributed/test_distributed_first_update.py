"""A run that stops before its first update continues with the bits of one that does not, under every strategy."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest

from support.runs import manifest
from support.trials import Trials

OPTIMIZERS = ("adamw", "muon", "lion", "adafactor", *(["adamw8bit"] if find_spec("torchao") else []))
#: Number of workers, and the overrides of a strategy.
STRATEGIES = {
    "alone": (1, ""),
    "ddp": (2, "parallel.strategy=ddp"),
    "zero1": (2, "parallel.strategy=zero1"),
    "zero2": (2, "parallel.strategy=zero2"),
    "zero3": (2, "parallel.strategy=zero3"),
    "hsdp": (4, "parallel.strategy=hsdp"),
    "pipeline": (2, "parallel.pipeline=2"),
    "tensor": (2, "parallel.tensor=2"),
    "context": (2, "parallel.context=2"),
}
ENGINES = {f"deepspeed_zero{n}": (2, f"parallel.strategy=deepspeed_zero{n}") for n in (1, 2, 3)}
ELASTIC = {f"elastic-{s}": (2, f"parallel.strategy={s} determinism=elastic") for s in ("zero1", "zero2", "zero3")}
#: Optimizers that update elements on their own, which flat and elastic parts of a matrix need.
ELEMENTWISE = ("adamw", "lion")
FEW = [("adamw", "zero2"), ("muon", "zero3"), ("lion", "pipeline")]


def every_pair() -> list[tuple[str, str]]:
    pairs = [(optimizer, strategy) for optimizer in OPTIMIZERS for strategy in STRATEGIES]
    whole_rows = ("adafactor", "adamw8bit")
    pairs = [(o, s) for o, s in pairs if not (o in whole_rows and s == "tensor")]
    engines = ENGINES if find_spec("deepspeed") else {}
    return pairs + [(o, s) for o in ELEMENTWISE for s in (*engines, *ELASTIC)]


@pytest.mark.parametrize("pairs", [FEW, pytest.param(every_pair(), marks=pytest.mark.slow)], ids=["few", "all"])
def test_a_run_stopped_before_its_first_update_continues_bit_for_bit(
    trials: Callable[..., Trials], monkeypatch: pytest.MonkeyPatch, pairs: list[tuple[str, str]]
) -> None:
    """The first two steps are not finite, and the run is saved after them. A copy continues from there."""
    runs = trials(
        # Matrices of 8 bits: rows of 64 elements.
        model={"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 64, "dropout": 0.1},
        train={"steps": 4, "sequence_length": 16},
        checkpoint={"every": "2 steps"},
    )
    strategies = STRATEGIES | ENGINES | ELASTIC
    # The runs share their processes, in which each of them passes these points once more.
    orders = [f"nan@gradient={step}:{time}" for step in (1, 2) for time in range(1, len(pairs) + 1)]
    monkeypatch.setenv("HEADWAY_FAULTS", ",".join(orders))
    for optimizer, strategy in pairs:
        workers, overrides = strategies[strategy]
        runs.add(f"{optimizer}-{strategy}", workers, f"optimizer.name={optimizer}", *overrides.split())
    runs.run()
    for optimizer, strategy in pairs:
        workers, overrides = strategies[strategy]
        whole = f"{optimizer}-{strategy}"
        runs.add(f"{whole}-again", workers, f"optimizer.name={optimizer}", *overrides.split(), copy_of=whole)
    runs.run()
    for optimizer, strategy in pairs:
        name = f"{optimizer}-{strategy}"
        first, last = (manifest(runs.folder / "runs" / name, step) for step in (2, 4))
        assert first["cursor"]["skipped_steps"] == last["cursor"]["skipped_steps"] == 2, name
        assert any(key.startswith("optimizer.") for key in last["tensors"]), name
        assert runs.hash(f"{name}-again") == runs.hash(name), name
