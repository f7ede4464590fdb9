"""What is compiled, and whether it pays."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.config import Config, override
from headway.core.coordination.heartbeat import Phase
from headway.models import loss
from headway.models.decoder import Decoder
from headway.training.setup import compiling
from headway.training.setup.compiling import Gain, compile_model, compiling_pays

LAYERS = 12
MODEL = [f"model.layers={LAYERS}", "model.dim=16", "model.heads=2", "model.ffn_dim=32", "model.vocab_size=64"]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    loss._compiled.cache_clear()
    # Puts back what `compile_model` sets.
    with (
        torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False),
        torch._functorch.config.patch(ban_recompute_materialized_backward=True),
    ):
        yield
    torch._dynamo.reset()
    loss._compiled.cache_clear()


@pytest.fixture
def config() -> Config:
    return override(Config(), [*MODEL, "train.sequence_length=8", "train.steps=10"])


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "headway" / "compile.json"


def ids(length: int = 8) -> torch.Tensor:
    return torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(length))


def loss_of(model: Decoder, length: int = 8) -> torch.Tensor:
    value: torch.Tensor = model(ids(length), ids(length).roll(1))
    return value


@pytest.mark.slow
def test_layers_are_traced_once_for_all_and_shapes_one_by_one(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[torch.fx.GraphModule] = []
    original: Callable[..., Any] = torch.compile

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        traced.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda f, **options: original(f, backend=backend, **options))
    model, plain = Decoder(config.model), Decoder(config.model)
    for each in (model, plain):
        each.initialize(1)
    compile_model(config.parallel, model)
    in_layers = []
    for length in (8, 4, 8, 6):
        assert torch.equal(loss_of(model, length), loss_of(plain, length))
        in_layers.append(sum("scaled_dot_product" in graph.code for graph in traced))
    assert in_layers == [1, 2, 2, 3]
    assert model.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_backward_pass_computes_again_on_the_cpu_alone(config: Config, device: str) -> None:
    compile_model(config.parallel, Decoder(config.model).to(device))
    assert torch._functorch.config.ban_recompute_materialized_backward == (device != "cpu")


def test_what_is_known_of_a_layer_is_found_again_wherever_its_shape_comes_from(config: Config) -> None:
    def key_of(given: Config) -> str:
        return compiling._key(given.model, given.train, given.determinism, torch.device("cpu"), 2)

    key = key_of(config)
    for change in ({"preset": None}, {"from_pretrained": Path("elsewhere")}, {"layers": 99}):
        other = config.model_copy(update={"model": config.model.model_copy(update=change)})
        assert key_of(other) == key, change
    assert key_of(override(config, ["model.ffn_dim=64"])) != key


def test_too_many_shapes_are_refused_instead_of_computed_otherwise(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "_MOST_SHAPES", 2)
    original: Callable[..., Any] = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: original(f, backend="eager", **options))
    model = Decoder(config.model)
    compile_model(config.parallel, model)
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        for length in (3, 4, 5, 6, 7):
            loss_of(model, length)


def test_it_pays_when_more_is_saved_than_compiling_takes() -> None:
    gain = Gain(eager_seconds=0.010, compiled_seconds=0.008, compile_seconds=20.0)
    assert gain.pays(10_001) and not gain.pays(9_999)
    assert not Gain(0.010, 0.011, 1.0).pays(10**9)


def pays(config: Config, rows: int, micro_batches: int) -> bool:
    cpu = torch.device("cpu")
    shape = (config.model, config.train, config.determinism)
    return compiling_pays(*shape, cpu, rows=rows, micro_batches=micro_batches)


def test_a_short_run_does_not_try(config: Config, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not pays(config, 2, 10)
    assert not cache.exists() and "a trial does not pay" in capsys.readouterr().err


def test_what_was_measured_is_remembered(
    config: Config, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = []

    def measure(trial: Any) -> Gain:
        measured.append(trial)
        return Gain(0.010, 0.008, 20.0)

    monkeypatch.setattr(compiling._Trial, "measure", measure)
    assert pays(config, 2, 10**9)
    assert "compiled: a layer takes 10.0 ms, compiled 8.0 ms" in capsys.readouterr().err
    # Another length of the run is another answer to the same figures; other rows are other figures.
    assert not pays(config, 2, 10) and len(measured) == 1
    pays(config, 4, 10**9)
    assert len(measured) == 2 and len(json.loads(cache.read_bytes())) == 2
    cache.write_text("not JSON")
    assert pays(config, 2, 10**9) and len(measured) == 3


def test_a_compiler_that_fails_is_said_and_not_used(
    config: Config, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(trial: Any) -> Gain:
        raise RuntimeError("no C++ compiler\nand much more")

    monkeypatch.setattr(compiling._Trial, "measure", measure)
    assert not pays(config, 2, 10**9)
    assert "not compiled: RuntimeError: no C++ compiler" in capsys.readouterr().err and not cache.exists()


def test_a_trial_leaves_no_trace(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    original: Callable[..., Any] = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: original(f, backend="eager", **options))

    dropping = override(config, ["model.dropout=0.1"])
    trial = compiling._Trial(dropping.model, dropping.train, torch.device("cpu"), 2)
    before = torch.get_rng_state()
    gain = trial.measure()
    assert torch.equal(torch.get_rng_state(), before)
    assert min(gain.eager_seconds, gain.compiled_seconds, gain.compile_seconds) > 0
    assert all(p.grad is None for p in trial.layer.parameters()) and trial.x_BTD.grad is None


def test_nothing_of_the_compiler_is_loaded_for_nothing() -> None:
    code = "import sys, headway.training.setup.compiling; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_watchdog_knows_of_a_shape_that_is_compiled_in_the_middle_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Phase] = []
    monkeypatch.setattr(compiling, "beat", told.append)
    compiling._report_compiling.cache_clear()  # a reset of the compiler has made it forget
    compiling._report_compiling()
    twice = torch.compile(lambda x: 2 * x, backend="eager", dynamic=False)
    for rows in (2, 2, 3):
        told.append(Phase.DATA)
        twice(torch.ones(rows))
    assert told == [Phase.DATA, Phase.START, Phase.COMPUTE, Phase.DATA, Phase.DATA, Phase.START, Phase.COMPUTE]
