"""Memory of models of transformers: plans against real steps, and the presets against a published shape of 8 B."""

from __future__ import annotations

import gc
import importlib.util
import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.config import Config, load_config, resolve, resolve_lanes
from headway.core.errors import ConfigError
from headway.lab.bench.meter import Allocations, live_bytes
from headway.lab.plan.accelerators import Machines, parse_machines
from headway.lab.plan.layout import Layout
from headway.lab.plan.memory import plan_memory
from headway.lab.plan.prepare import make_plan, plan_as_it_is
from headway.lab.plan.recommend import Option
from headway.models.build import complete
from headway.models.hub.frozen import freeze_as_configured
from headway.models.hub.sizes import model_without_weights
from headway.models.hub.transformers_build import build_transformers_model
from headway.parallel.strategy import make_strategy
from headway.parallel.world import World
from headway.training.optimizer import build_optimizer
from headway.training.state import TrainState
from headway.training.step import TrainStep
from headway.training.task import LANGUAGE_MODELLING, Task
from support.families import write_family
from support.states import parts

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[4]
LENGTH, VOCAB = 128, 2048
SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": VOCAB,
         "max_position_embeddings": LENGTH}  # fmt: skip


def _config(model: dict[str, Any], **sections: Any) -> Config:
    train = {"steps": 1, "sequence_length": LENGTH, "global_batch": 4, "micro_batch": 4, "device": "cpu"}
    values = {"model": model, "train": {**train, **sections.pop("train", {})}, **sections}
    config = resolve(Config.model_validate(values))
    return config.model_copy(update={"model": complete(config.model, 1)})


def _measured(config: Config) -> int:
    """Return the most bytes that a real step takes, model included."""
    grid = resolve_lanes(config, 1)
    world = World(0, 1, 0, torch.device("cpu"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    before = live_bytes()
    meter = Allocations()
    try:
        model = build_transformers_model(config.model, seed=0).train()
        model.loss_from_hidden = "Gemma2" not in type(model.causal).__name__
        model.set_activation_checkpointing(config.train.activation_checkpointing)
        freeze_as_configured(model, config.train.precision)
        strategy = make_strategy(config, model, world)
        optimizer = build_optimizer(config.optimizer, model, world.device, strategy.owns_for_update)
        step = TrainStep(
            parts(config, Task(model, None, LANGUAGE_MODELLING), TrainState(model, optimizer), strategy, world, None)
        )  # type: ignore[arg-type]
        for measures in (False, True):  # moments are there from the first step on
            rows = [
                {name: torch.randint(VOCAB, (grid.micro_batch, LENGTH)) for name in ("ids", "targets")}
                for _ in range(grid.micro_batches)
            ]
            if measures:
                strategy.begin()  # frees the gradients, which the meter would take for lasting
                meter.start()
            step.run({0: rows})
        return meter.stop() - before
    finally:
        torch.set_num_threads(threads)


def _case(precision: str, checkpointing: str, **train: Any) -> dict[str, Any]:
    return {"precision": precision, "activation_checkpointing": checkpointing, **train}


_slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("family", "adapter", "train"),
    [
        pytest.param("llama-3", None, _case("fp32", "none"), marks=_slow),
        pytest.param("qwen3", None, _case("fp32", "full"), marks=_slow),
        ("llama-3", {"rank": 8}, _case("bf16", "full", micro_batch=2)),
        pytest.param("llama-3", {"rank": 8, "frozen_precision": "nf4"}, _case("bf16", "none"), marks=_slow),
        pytest.param("gemma-2", None, _case("fp32", "selective"), marks=_slow),
        pytest.param("nemotron-h", None, _case("fp32", "none"), marks=_slow),
    ],
)
def test_a_step_takes_what_is_planned(
    family: str, adapter: dict[str, Any] | None, train: dict[str, Any], tmp_path: Path
) -> None:
    sizes = {**SIZES, **({"head_dim": 32} if family == "gemma-2" else {})}
    source = write_family(family, tmp_path / "model", **sizes)
    model = {"from_pretrained": str(source), "implementation": "transformers", "adapter": adapter}
    config = _config(model, train=train)
    measured = _measured(config)
    planned = plan_memory(config, config.model, Layout.of(config, 1), "cpu").peak_bytes
    assert abs(planned / measured - 1) < 0.05, (planned, measured)


#: Shape of Llama 3 8B, with the type of its weights (Dubey et al. 2024, table 3).
LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def _preset(name: str, machines: str, folder: Path, *changes: str, **shape: Any) -> tuple[Config, Machines]:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA_3_8B, **shape}))
    place, found = [f"model.from_pretrained={folder}", *changes], parse_machines(machines)
    return load_config(name, [*place, f"parallel.workers={found.count}"]), found


def _own(*words: Any, **shape: Any) -> Option:
    """What a plan says of the config as it is, without all other ways: these take ten times as long."""
    return plan_as_it_is(*_preset(*words, **shape))


def _linears() -> dict[str, tuple[int, int]]:
    dim, inner, keys = 4096, 14336, 1024
    return {"q": (dim, dim), "k": (keys, dim), "v": (keys, dim), "o": (dim, dim),
            "gate": (inner, dim), "up": (inner, dim), "down": (dim, inner)}  # fmt: skip


def test_an_adapter_on_8_b_fits_24_gb_with_recomputation(tmp_path: Path) -> None:
    plan = make_plan(*_preset("cpt-24gb", "RTX-4090", tmp_path))
    fits = {option.checkpointing: option.fits for option in plan.table}
    assert fits == {"none": False, "selective": False, "full": True}
    # Frozen matrices and embeddings in bf16, norms and adapters in fp32; counted here by hand.
    frozen = 2 * (32 * sum(map(prod, _linears().values())) + 2 * 128256 * 4096) + 4 * 65 * 4096
    adapter = 32 * sum(16 * (rows + columns) for rows, columns in _linears().values())
    own = plan.own.memory
    assert own is not None
    assert own.peak.parts["weights"] == frozen + 4 * adapter
    assert own.peak.parts["gradients"] == 4 * adapter
    # Of `lora_A` (16 x columns) two moments of a byte with a scale for every 256; rows of `lora_B` are too short.
    blocks = 32 * 16 * sum(columns for _, columns in _linears().values())
    assert own.peak.parts["optimizer"] == 8 * (adapter - blocks) + 2 * blocks * (1 + 4 / 256)
    nf4 = _own("cpt-24gb-qlora", "RTX-4090", tmp_path)
    few = (1 / 2 + 4 / 64) * 32 * sum(map(prod, _linears().values())) + 2 * 2 * 128256 * 4096 + 4 * 65 * 4096
    assert nf4.memory is not None and nf4.memory.peak.parts["weights"] == few + 4 * adapter
    # The peak is the loss: of each of 32 layers its input.
    assert own.peak.parts["activations"] == pytest.approx(32 * 4 * 4096 * 4096, rel=0.01)


def test_all_of_8_b_fits_four_cards_of_80_gb_and_not_one_of_24(tmp_path: Path) -> None:
    total = 32 * sum(map(prod, _linears().values())) + 2 * 128256 * 4096 + 65 * 4096
    for name, strategy in (("cpt-4x80gb", "zero3"), ("cpt-4x80gb-deepspeed", "deepspeed_zero3")):
        own = _own(name, "4xH100", tmp_path, "model.implementation=transformers")
        assert own.fits and own.strategy == strategy and own.memory is not None
        assert own.memory.peak.parts["weights"] == pytest.approx(total, rel=0.01)  # 4 bytes, a quarter of them here
        own = _own(name, "4xRTX-4090", tmp_path, "model.implementation=transformers")
        assert own.fits is False


def test_moments_in_host_memory_let_a_small_model_train_in_full_on_24_gb(tmp_path: Path) -> None:
    name, machines, change = "cpt-24gb-full", "RTX-4090", "model.implementation=transformers"
    own = _own(name, machines, tmp_path, change)
    assert own.refusal is None and own.fits is False, "8 B in fp32 are 30 GiB"
    small = {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "num_key_value_heads": 8,
             "head_dim": 64, "tie_word_embeddings": True}  # fmt: skip
    own = _own(name, machines, tmp_path / "small", change, **small)
    assert own.fits and own.memory is not None, own.memory and own.memory.peak
    assert own.memory.peak.parts["optimizer"] == 0


def test_what_cannot_be_planned_is_said(tmp_path: Path) -> None:
    folder = write_family("mixtral", tmp_path / "model")
    config = Config.model_validate({
        "model": {"from_pretrained": str(folder), "implementation": "transformers"},
        "train": {"steps": 1, "sequence_length": 32, "precision": "fp32"},
        "parallel": {"tensor": 2, "workers": 2},
    })  # fmt: skip
    with pytest.raises(ConfigError, match=r"not divided by tensor"):
        make_plan(resolve(config), parse_machines("2xL4"))


def test_adapters_under_deepspeed_count_frozen_weights_whole_or_divided(tmp_path: Path) -> None:
    config = _config(
        {"from_pretrained": str(write_family("qwen3", tmp_path / "model")), "implementation": "transformers",
         "adapter": {"rank": 2}},
        train={"sequence_length": 32, "precision": "fp32", "micro_batch": 1}, parallel={"workers": 2},
    )  # fmt: skip
    model = model_without_weights(config.model)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    padding = 2 * 4 * 2 * len(list(model.parameters()))
    for stage in (1, 2, 3):
        asked = config.model_copy(
            update={"parallel": config.parallel.model_copy(update={"strategy": f"deepspeed_zero{stage}"})}
        )
        own = make_plan(asked, parse_machines("2xL4")).own
        assert own.refusal is None and own.memory is not None
        moments = {moment.name: moment for moment in own.memory.moments}
        whole = trained + frozen
        assert moments["update"].weights == pytest.approx(whole / 2 if stage == 3 else whole, abs=padding)
        # A copy for the update and two moments, of half of what is trained; gradients twice while they are flattened.
        assert moments["update"].optimizer == pytest.approx(3 * trained / 2, abs=padding)
        assert moments["update"].gradients <= 1.5 * trained + padding
        if stage == 3:
            # Small as they are, all of them stay gathered; before they are divided, they are there whole too.
            assert moments["loss"].communication >= 4 * 500_000_000 + whole
            assert moments["taken over"].weights > whole
        else:
            assert moments["taken over"].weights == pytest.approx(whole, abs=padding)
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install '.[deepspeed]'")
    listed = {option.strategy for option in make_plan(config, parse_machines("2xL4")).table if option.fits}
    assert {"ddp", "zero1", "zero2", "zero3", *(f"deepspeed_zero{stage}" for stage in (1, 2, 3))} <= listed


def test_the_docs_have_what_is_planned_for_the_presets() -> None:
    script = ROOT / "benchmarks" / "plan" / "presets.py"
    if not script.exists():
        pytest.skip("the benchmarks are not part of this copy")
    spec = importlib.util.spec_from_file_location("presets_of_the_docs", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (ROOT / "docs" / "continue-a-model.md").read_text(encoding="utf-8")
    assert "\n".join(module.table()) in page, "run: python benchmarks/plan/presets.py"
