"""Precisions: what is refused where, loss scaling as a function of the cursor, and what 8 bits are for."""

from __future__ import annotations

import copy
import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from headway.config import Config, ModelConfig, load_config, override, resolve
from headway.config.sections.health import HealthConfig
from headway.core.errors import ConfigError
from headway.models.decoder import Decoder
from headway.models.loss import linear_cross_entropy
from headway.parallel.strategy import make_strategy
from headway.parallel.world import World
from headway.run.session.attempt import write_config
from headway.run.session.precision import with_precision
from headway.training.health.decisions import Decision
from headway.training.optimizer import build_optimizer
from headway.training.setup.determinism import determinism_restored
from headway.training.setup.precision import (
    FIRST_SCALE,
    GROWTH_INTERVAL,
    LEAST_SCALE,
    MOST_SCALE,
    apply_precision,
    autocast,
    begin_scaling,
    check_present,
    convert_to_fp8,
    update_scale,
)
from headway.training.state import Cursor, TrainState
from headway.training.step import StepResult, TrainStep
from headway.training.task import LANGUAGE_MODELLING, Objective, Task
from support.states import parts

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
WORLD = World(0, 1, 0, CPU)


@pytest.mark.parametrize(
    ("precision", "device", "capability", "nearest"),
    [
        ("tf32", CPU, None, "fp32"),
        ("tf32", CUDA, (7, 5), "fp32"),
        ("tf32", CUDA, (8, 0), None),
        ("fp8", CPU, None, "bf16"),
        ("fp8", CUDA, (8, 6), "bf16"),
        ("fp8", CUDA, (8, 9), None),
        ("fp8", CUDA, (10, 0), None),
        ("fp16", CPU, None, None),
        ("bf16", CUDA, (7, 0), None),
    ],
)
def test_a_precision_that_the_device_lacks_is_refused(
    precision: str, device: torch.device, capability: tuple[int, int] | None, nearest: str | None
) -> None:
    if nearest is None:
        check_present(precision, device, capability)
        return
    with pytest.raises(ConfigError, match="compute capability") as error:
        check_present(precision, device, capability)
    assert error.value.fix == f"train.precision={nearest}"


def test_the_process_is_set_for_every_run_anew() -> None:
    with determinism_restored():
        for precision in ("tf32", "fp32", "tf32", "bf16"):
            apply_precision(config(precision).train, nn.Linear(2, 2), CUDA)
            assert torch.get_float32_matmul_precision() == ("high" if precision == "tf32" else "highest")
            assert torch.backends.cudnn.allow_tf32 == (precision == "tf32"), "convolutions"


def config(precision: str, **train: object) -> Config:
    values = {"steps": 20, "precision": precision, "max_grad_norm": 1.0, **train}
    return resolve(Config.model_validate({"train": values, "optimizer": {"learning_rate": 0.01}}))


def setup(c: Config) -> tuple[Task, TrainState]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def summed_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        # The factor is the gradient's, not the loss's: a gradient can overflow alone.
        y = model(batch["x"])
        y = y + (batch["factor"] - 1) * (y - y.detach())
        return (y.float() - batch["x"][:, :1]).square().sum()

    task = Task(model, None, Objective(summed_loss, lambda batch: len(batch["x"])))  # type: ignore[arg-type]
    state = TrainState(model, build_optimizer(c.optimizer, model, CPU))
    begin_scaling(state.cursor, c.train.precision)
    return task, state


def step(c: Config, task: Task, state: TrainState, factor: float = 1.0) -> StepResult:
    generator = torch.Generator().manual_seed(state.cursor.step)
    batch = {"x": torch.randn(16, 8, generator=generator), "factor": torch.tensor(factor)}
    return TrainStep(parts(c, task, state, make_strategy(c, task.model, WORLD), WORLD)).run({0: [batch]})


def tensors(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: block.local for name, block in state.blocks().items()}


def assert_same(a: TrainState, b: TrainState) -> None:
    one, other = tensors(a), tensors(b)
    assert one.keys() == other.keys() and a.cursor == b.cursor
    assert not [key for key in one if not torch.equal(one[key], other[key])]


def test_a_scale_changes_no_bit_of_a_gradient_in_range() -> None:
    c = config("fp32")
    results = []
    for scale in (None, 1, 2**9):
        task, state = setup(c)
        state.cursor.loss_scale = scale
        results.append((state, [step(c, task, state) for _ in range(3)]))
        state.cursor.loss_scale, state.cursor.steps_at_scale = None, 0
    for state, steps in results[1:]:
        assert_same(state, results[0][0])
        assert steps == results[0][1]


def test_fp16_learns_what_fp32_does() -> None:
    losses = {}
    for precision in ("fp32", "fp16"):
        c = config(precision)
        task, state = setup(c)
        losses[precision] = [step(c, task, state).loss for _ in range(20)]
    assert losses["fp16"] != losses["fp32"]
    assert losses["fp16"] == pytest.approx(losses["fp32"], rel=0.02)
    assert losses["fp16"][-1] < losses["fp16"][0] * 0.7


def test_an_overflow_halves_the_scale_and_is_no_divergence() -> None:
    c = config("fp16")
    task, state = setup(c)
    step(c, task, state)
    before = {key: tensor.clone() for key, tensor in tensors(state).items()}
    result = step(c, task, state, factor=1000.0)
    assert result.skipped and math.isfinite(result.loss)
    assert not [key for key, tensor in tensors(state).items() if not torch.equal(tensor, before[key])]
    assert state.cursor == Cursor(2, skipped_steps=1, skipped_in_row=0, loss_scale=FIRST_SCALE // 2, steps_at_scale=0)
    step(c, task, state)
    assert state.cursor.skipped_steps == 1 and state.cursor.steps_at_scale == 1


@pytest.mark.parametrize("action", ["skip", "rollback", "stop"])
def test_an_overflow_is_written_down_and_not_said(action: str) -> None:
    """Whatever health would do about a gradient that is not finite."""
    c = config("fp16")
    c = c.model_copy(update={"health": HealthConfig(on_nonfinite=action)})  # type: ignore[arg-type]
    task, state = setup(c)
    assert step(c, task, state).decision is None
    decision = step(c, task, state, factor=1000.0).decision
    assert decision == Decision(1, "skip", f"the gradient overflowed at the loss scale {FIRST_SCALE:,}", 1, quiet=True)
    state.cursor.loss_scale = LEAST_SCALE
    decision = step(c, task, state, factor=6e4).decision
    assert decision is not None and decision.action == action and not decision.quiet


def test_at_the_least_scale_an_overflow_counts_as_a_failure() -> None:
    c = config("fp16")
    task, state = setup(c)
    state.cursor.loss_scale = LEAST_SCALE
    for failures in (1, 2):
        result = step(c, task, state, factor=6e4)
        assert result.skipped and math.isfinite(result.loss)
        assert state.cursor.skipped_in_row == failures
    assert state.cursor.loss_scale == LEAST_SCALE


def test_a_loss_that_is_not_finite_is_no_matter_of_the_scale() -> None:
    c = config("fp16")
    task, state = setup(c)
    assert step(c, task, state, factor=math.nan).skipped
    assert state.cursor.loss_scale == FIRST_SCALE and state.cursor.skipped_in_row == 1


def test_the_scale_grows_after_long_without_overflow_and_only_so_far() -> None:
    cursor = Cursor(loss_scale=MOST_SCALE // 2)
    for _ in range(GROWTH_INTERVAL - 1):
        update_scale(cursor, overflow=False)
    assert cursor.loss_scale == MOST_SCALE // 2
    for _ in range(GROWTH_INTERVAL + 1):
        update_scale(cursor, overflow=False)
    assert cursor.loss_scale == MOST_SCALE


def test_fp16_resumes_exactly_with_its_scale() -> None:
    c = config("fp16")
    task, whole = setup(c)
    factors = [1.0, 1000.0, 1.0, 1.0, 1.0]
    for factor in factors[:3]:
        step(c, task, whole, factor)
    saved = {key: tensor.clone() for key, tensor in tensors(whole).items()}
    record = copy.copy(whole.cursor_record())
    assert record["loss_scale"] == FIRST_SCALE // 2
    for factor in factors[3:]:
        step(c, task, whole, factor)
    task, resumed = setup(c)
    for key, block in resumed.prepare_to_load().items():
        block.local.copy_(saved[key])
    resumed.cursor = Cursor(**record)
    begin_scaling(resumed.cursor, "fp16")
    for factor in factors[3:]:
        step(c, task, resumed, factor)
    assert_same(whole, resumed)


def test_only_fp16_has_a_scale_in_its_record() -> None:
    c = config("fp32")
    _, state = setup(c)
    assert state.cursor_record() == {"step": 0, "skipped_steps": 0, "skipped_in_row": 0}
    cursor = Cursor(loss_scale=8, steps_at_scale=3)
    begin_scaling(cursor, "bf16")
    assert (cursor.loss_scale, cursor.steps_at_scale) == (None, 0)


def test_the_loss_of_a_large_vocabulary_is_finite_in_fp16() -> None:
    """Where all logits are equal, their exponentials add up to the size of the vocabulary: more than fp16 holds."""
    x = torch.zeros(4, 8, requires_grad=True)
    weight = torch.zeros(70_000, 8).requires_grad_()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = linear_cross_entropy(x + 1, weight, torch.arange(4))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(4 * math.log(70_000))
    assert weight.grad is not None and bool(weight.grad.isfinite().all())
    assert float(weight.grad[0, 0]) == pytest.approx(-1.0, rel=1e-3)


def tiny_decoder() -> Decoder:
    shape = {"dim": 32, "layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 16, "ffn_dim": 44, "vocab_size": 64}
    model = Decoder(ModelConfig.model_validate(shape))
    model.initialize(0)
    return model


def test_8_bits_are_for_layers_that_fill_tiles_and_not_for_the_output() -> None:
    pytest.importorskip("torchao")
    model, exact = tiny_decoder(), tiny_decoder()
    names = [name for name, _ in model.named_parameters()]
    converted = convert_to_fp8(model, 32, emulate=True)
    # The feed-forward layer is 44 wide, twice that for gate and up, and the head is the output projection.
    assert converted and all(name.startswith("layers.0.attention") for name in converted)
    assert [name for name, _ in model.named_parameters()] == names
    ids = torch.randint(0, 64, (2, 32))
    losses = []
    for each in (model, exact):
        loss = each(ids, ids.roll(-1))
        loss.backward()
        losses.append(float(loss.detach()))
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=1e-2)
    one, other = (m.layers[0].attention.output.weight.grad for m in (model, exact))
    assert float((one - other).norm() / other.norm()) < 0.2
    assert one.dtype == torch.float32


@pytest.mark.parametrize(("model", "length"), [(nn.Linear(16, 16), 20), (nn.Sequential(nn.Linear(3, 5)), 16)])
def test_8_bits_for_nothing_are_refused(model: nn.Module, length: int) -> None:
    pytest.importorskip("torchao")
    with pytest.raises(ConfigError, match=r"16") as error:
        convert_to_fp8(model, length)
    assert "bf16" in error.value.fix


def test_autocast_is_what_the_name_says() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    found = {}
    for precision in ("fp32", "tf32", "bf16", "fp16", "fp8"):
        with autocast(precision, CPU):
            found[precision] = layer(x).dtype
    half, plain = torch.bfloat16, torch.float32
    assert found == {"fp32": plain, "tf32": plain, "bf16": half, "fp16": torch.float16, "fp8": half}


def test_8_bits_with_tensor_parallelism_are_refused() -> None:
    values = {"train": {"steps": 1, "precision": "fp8"}, "parallel": {"tensor": 2, "workers": 2}}
    with pytest.raises(ConfigError, match="tensor-parallel"):
        resolve(Config.model_validate(values))


def test_auto_is_chosen_when_a_run_begins_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve(
        Config.model_validate({"runs": str(tmp_path), "train": {"steps": 1, "precision": "auto", "device": "cpu"}})
    )
    for fast, chosen in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr("headway.run.session.precision.cpu_multiplies_bf16", lambda fast=fast: fast)
        assert with_precision(config).train.precision == chosen
    config.run_directory.mkdir()
    write_config(override(config, ["train.precision=bf16"]), config.run_directory)
    assert with_precision(config).train.precision == "bf16", "as the run has begun, wherever it continues"
    assert with_precision(config, restart=True).train.precision == "fp32"
    fixed = override(config, ["train.precision=tf32"])
    assert with_precision(fixed) is fixed
    monkeypatch.setattr("headway.run.session.precision.cpu_multiplies_bf16", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    found = with_precision(config, restart=True).train.precision
    assert found == "fp32", "workers that are started one by one could measure different speeds"
    on_gpu = config.model_copy(update={"train": config.train.model_copy(update={"device": "cuda"})})
    assert with_precision(on_gpu, restart=True).train.precision == "bf16"


def test_presets_leave_the_precision_to_the_machine() -> None:
    assert {load_config(name).train.precision for name in ("quickstart", "gpu")} == {"auto"}


def test_micro_batches_share_the_cast_of_a_weight_with_the_bits_of_a_cast_each() -> None:
    """An objective of the user's own may use a weight twice, or without gradient, so there each pass casts."""
    values = {"steps": 20, "precision": "bf16", "global_batch": 6, "micro_batch": 1, "lanes": 2}
    c = resolve(Config.model_validate({"train": values, "model": {"dim": 32, "layers": 2, "heads": 2, "ffn_dim": 64}}))
    own = replace(LANGUAGE_MODELLING)

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if operator.overloadpacket.__name__ == "_to_copy" and id(args[0]) in products:
                casts[id(args[0])] += 1
            return operator(*args, **(kwargs or {}))

    found = {}
    for name, objective in (("shared", LANGUAGE_MODELLING), ("shared inside", LANGUAGE_MODELLING), ("apart", own)):
        model = Decoder(c.model.model_copy(update={"vocab_size": 64}))
        model.initialize(seed=1)
        state = TrainState(model, build_optimizer(c.optimizer, model, CPU))
        strategy = make_strategy(c, model, WORLD)
        one = TrainStep(parts(c, Task(model, None, objective), state, strategy, WORLD))  # type: ignore[arg-type]
        products, casts = {id(p) for p in model.product_parameters()}, Counter[int]()
        # A caller's own context does not end between steps, so PyTorch does not empty its cache by itself.
        with torch.autocast("cpu", enabled=False) if name == "shared inside" else nullcontext(), Casts():
            for number in range(3):
                generator = torch.Generator().manual_seed(number)
                rows = [torch.randint(0, 64, (2, 1, 32), generator=generator) for _ in range(6)]
                lanes = [[{"ids": ids, "targets": targets} for ids, targets in lane] for lane in (rows[:3], rows[3:])]
                one.run(dict(enumerate(lanes)))
        assert set(casts.values()) == {3 * 6 if objective is own else 3} and len(casts) == len(products), name
        found[name] = state
    assert_same(found["shared"], found["apart"])
    assert_same(found["shared inside"], found["apart"])
