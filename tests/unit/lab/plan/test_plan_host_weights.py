"""Weights in bf16 with masters, moments and gradients in host memory: what is planned beside what a real step takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cuda_in_memory.emulated_cuda import environment
from headway.config import Config, load_config, resolve
from headway.lab.plan import host_weights
from headway.lab.plan.accelerators import parse_machines
from headway.lab.plan.layout import Layout
from headway.lab.plan.memory import plan_memory
from headway.lab.plan.prepare import make_plan, plan_as_it_is
from headway.models.facts import count_parameters
from headway.parallel.host_weights import transfers

TESTS = Path(__file__).parents[3]
SCRIPT = TESTS.parent / "benchmarks" / "gpu" / "host_weights.py"
GIB = 2**30
_30M = {"dim": 512, "layers": 6, "heads": 8, "kv_heads": 4, "ffn_dim": 1536, "vocab_size": 8192}
_VOCABULARY = {"dim": 256, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_dim": 768, "vocab_size": 65536}
_350M = {"dim": 1024, "layers": 24, "heads": 16, "kv_heads": 8, "ffn_dim": 3072, "vocab_size": 32768}
#: Qwen3-8B (Qwen3 Technical Report 2025, table 1).
_8B = {
    "dim": 4096, "layers": 36, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn_dim": 12288, "vocab_size": 151936,
    "qk_norm": True,
}  # fmt: skip


def values(model: dict[str, Any], length: int = 256, moments: str = "fp32", **train: Any) -> dict[str, Any]:
    return {
        "model": {"max_sequence_length": length, **model},
        "optimizer": {"name": "adamw", "moments": moments},
        "train": {
            "steps": 3, "sequence_length": length, "micro_batch": 1, "global_batch": 2, "lanes": 1, "weights": "bf16",
            "precision": "bf16", "activation_checkpointing": "full", "device": "cuda", **train,
        },
        "parallel": {"strategy": "single", "workers": 1},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("model", "moments", "train"),
    [
        (_30M, "fp32", {}),
        pytest.param({**_30M, "tie_embeddings": True}, "bf16", {}, marks=pytest.mark.slow),
        pytest.param(_30M, "fp32", {"activation_checkpointing": "selective"}, marks=pytest.mark.slow),
        pytest.param(_30M, "fp32", {"micro_batch": 2}, marks=pytest.mark.slow),
        pytest.param(_30M, "bf16", {"weights": "bf16_stochastic"}, marks=pytest.mark.slow),
        pytest.param(_VOCABULARY, "bf16", {}, marks=pytest.mark.slow),
        pytest.param(_350M, "fp32", {}, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)
def test_a_step_takes_what_is_planned_on_device_and_host(
    model: dict[str, Any], moments: str, train: dict[str, Any]
) -> None:
    variables = environment()
    if torch.cuda.is_available() or variables is None:
        pytest.skip("there is a GPU, or no compiler for an emulated one")
    variables["PYTHONPATH"] += f":{TESTS}"
    given = values(model, moments=moments, **train)
    script = [sys.executable, str(TESTS / "distributed" / "host_weights_peak.py"), json.dumps(given)]
    done = subprocess.run(script, env=variables, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    config = resolve(Config.model_validate(given))
    planned = plan_memory(config, config.model, Layout.of(config, 1), "cuda")
    assert planned.peak_bytes == pytest.approx(max(found["peaks"]), rel=0.05)
    tensors = planned.host.total - planned.host.rest
    assert tensors == pytest.approx(found["host"], rel=0.01)
    assert planned.host.pinned == found["pinned"]


def test_8_b_fits_a_card_of_24_gb_and_128_gib_of_host_memory() -> None:
    """The parts by hand: bf16 weights, inputs of 36 layers in bf16, fp32 masters, sums and two moments."""
    config = resolve(Config.model_validate(values(_8B, 4096, global_batch=16)))
    made = plan_as_it_is(config, parse_machines("1xRTX-4090", host_gib=128))
    total = count_parameters(config.model).total
    assert made.fits and made.memory is not None
    parts = made.memory.peak.parts
    assert total == pytest.approx(8.19e9, rel=0.001) and parts["weights"] == 2 * total
    assert parts["gradients"] == parts["optimizer"] == 0, "the peak is the loss"
    assert parts["activations"] == pytest.approx(36 * 2 * 4096 * 4096, rel=0.06)
    # With 1.7 GiB for the context and fragments.
    assert 21.6 <= made.memory.peak_bytes / GIB + 1.7 <= 22.8
    host = made.memory.host
    assert host.weights == host.gradients == host.optimizer // 2 == 4 * total and host.saves == 0
    assert host.total / GIB == pytest.approx(126.2, abs=0.1)
    small = resolve(Config.model_validate(values(_8B, 4096, "bf16", global_batch=16)))
    fewer = plan_as_it_is(small, parse_machines("1xRTX-4090", host_gib=96))
    assert fewer.fits and fewer.memory is not None and fewer.memory.host.optimizer == 4 * total
    assert plan_as_it_is(config, parse_machines("1xRTX-4090", host_gib=96)).fits is False


def test_the_preset_for_8_b_has_these_settings() -> None:
    shape = [f"model.{key}={value}" for key, value in {**_8B, "max_sequence_length": 4096}.items()]
    preset = load_config("cpt-24gb-full-8b", ["model.from_pretrained=null", *shape])
    made = make_plan(preset, parse_machines("1xRTX-4090", host_gib=128))
    assert made.own.fits and made.own.strategy == "single" and preset.train.weights == "bf16"
    assert made.disk.checkpoint_bytes == 12 * made.counts.total


@pytest.mark.parametrize(("strategy", "least"), [("zero2", 20.0), ("zero3", 15.0)])
def test_two_workers_share_masters_and_moments(strategy: str, least: float) -> None:
    given = values(_8B, 4096, global_batch=16, lanes=2)
    given["parallel"] = {"strategy": strategy, "workers": 2}
    config = resolve(Config.model_validate(given))
    made = plan_as_it_is(config, parse_machines("2xRTX-4090", host_gib=160))
    total = count_parameters(config.model).total
    assert made.memory is not None and made.fits
    assert made.memory.peak_bytes / GIB >= least
    assert made.memory.host.weights == pytest.approx(2 * total, rel=0.01)
    assert made.memory.host.optimizer == pytest.approx(4 * total, rel=0.01)


def test_on_a_cpu_masters_and_moments_count_with_the_rest() -> None:
    given = values(_30M)
    given["train"]["device"] = "cpu"
    config = resolve(Config.model_validate(given))
    planned = plan_memory(config, config.model, Layout.of(config, 1), "cpu")
    total = count_parameters(config.model).total
    assert planned.host.total == 0 and planned.peak_bytes > 18 * total
    assert (planned.peak.parts["weights"], planned.peak.parts["optimizer"]) == (6 * total, 8 * total)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not SCRIPT.exists(), reason="the benchmarks are not part of this copy")
def test_the_script_for_a_gpu_runs_in_its_tiny_form(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    command = [sys.executable, str(SCRIPT), "--tiny", "--parts", "offload", "large", "kill", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())["results"]
    assert found["kill"]["headway"]["equal"] is True
    assert found["offload"]["headway"]["save"]["whole_seconds"] > 0 and found["large"]["headway"]["fits"] is True


def test_it_is_recommended_where_nothing_else_fits() -> None:
    given = values(_8B, 4096, global_batch=16, weights="fp32")
    config = resolve(Config.model_validate(given))
    chosen = make_plan(config, parse_machines("1xRTX-4090", host_gib=128)).recommendation
    assert chosen.option is not None and chosen.option.more == ("train.weights=bf16",)
    assert "126.2 GiB of host memory" in chosen.reason
    assert make_plan(config, parse_machines("1xRTX-4090", host_gib=96)).recommendation.option is None
    # A larger card has room for moments in 8 bits, which need no host memory.
    assert "train.weights=bf16" not in make_plan(config, parse_machines("1xH100")).recommendation.reason


def test_the_plan_counts_the_buffers_that_copies_have() -> None:
    pinned = host_weights._BUFFERS * host_weights._PIECE * 4
    assert (host_weights._PIECE, pinned) == (transfers.PIECE, transfers.PINNED_BYTES)
