"""A mixture of experts from the command line: trained, killed, resumed, exported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from headway.telemetry.metrics import read_metrics
from support.runs import headway, manifest, state_hash

EXPERTS = {
    "experts": 4,
    "experts_per_token": 2,
    "shared_experts": 1,
    "dense_layers": 1,
    "expert_ffn_dim": 24,
    "router_score": "sigmoid",
    "balance_bias_rate": 0.01,
}


@pytest.mark.slow
def test_killed_and_resumed_it_has_the_same_state_and_transformers_computes_it(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    config = tiny(model=EXPERTS)
    assert headway("train", config, "name=whole").returncode == 0
    for phase in ("step=3", "gradient=6"):
        killed = headway("train", config, "name=killed", faults=f"kill@{phase}")
        assert "died (signal 9)" in killed.stderr, (phase, killed.stderr)
    resumed = headway("train", config, "name=killed")
    assert resumed.returncode == 0, resumed.stderr
    whole = tmp_path / "runs" / "whole"
    assert state_hash(tmp_path / "runs" / "killed") == state_hash(whole)

    metrics = read_metrics(whole)
    steps, loads = metrics.series("train/expert_load_max")
    assert list(steps) == list(range(1, 11)) and all(1.0 <= float(load) <= 2.0 for load in loads)
    assert set(metrics.series("train/dropped_share")[1]) == {0.0}
    assert all(float(loss) > 0 for loss in metrics.series("train/router_z_loss")[1])

    transformers = pytest.importorskip("transformers")
    exported = headway("export", whole, tmp_path / "out")
    assert exported.returncode == 0, exported.stderr
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(theirs).__name__ == "Glm4MoeForCausalLM"
    bias = theirs.model.layers[1].mlp.gate.e_score_correction_bias
    with safe_open(checkpoint_file(whole, "model.layers.1.feed_forward.selection_bias"), framework="pt") as file:
        saved = file.get_tensor("model.layers.1.feed_forward.selection_bias")
    assert torch.equal(bias, saved) and saved.abs().max() > 0.005

    cut = ("parallel.expert=3", "parallel.workers=3", "train.global_batch=9")
    refused = headway("train", tiny(), "name=tuned", f"model.from_pretrained={tmp_path / 'out'}", *cut)
    assert refused.returncode == 2 and "4 experts cannot be shared evenly by 3 workers" in refused.stderr, (
        refused.stderr
    )
    assert not (tmp_path / "runs" / "tuned").exists()

    from headway.models.build import build_model
    from headway.models.huggingface.checkpoint import import_model

    imported, state = import_model(tmp_path / "out")
    mine = build_model(imported, vocab_size=1, seed=0, initialize=False).eval()
    mine.load_state_dict(state)
    ids = torch.randint(300, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(mine(ids), theirs(ids).logits, rtol=1e-5, atol=1e-5)


def checkpoint_file(run: Path, tensor: str) -> Path:
    """The newest checkpoint's file that holds a tensor."""
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    for file in sorted(newest.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            if tensor in opened.keys():  # noqa: SIM118 (not a mapping)
                return file
    raise AssertionError(f"{tensor} is in none of {sorted(manifest(run))}")


def test_a_step_that_is_skipped_moves_no_bias(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """The step after it starts from the same weights and biases as if it had not been."""
    config = tiny(model=EXPERTS, train={"steps": 1})
    assert headway("train", config, "name=skipped", faults="nan@gradient=1").returncode == 0
    run = tmp_path / "runs" / "skipped"
    with safe_open(checkpoint_file(run, "model.layers.1.feed_forward.selection_bias"), framework="pt") as file:
        assert not file.get_tensor("model.layers.1.feed_forward.selection_bias").any()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.expert=2"], "experts cannot be sharded over 2 of 1 workers"),
        (["parallel.strategy=deepspeed_zero2"], "which DeepSpeed would scale"),
        (["model.experts_per_token=5"], "a token cannot have 5 experts of 4"),
        (["model.dense_layers=2"], "leaves none of 2 layers"),
        (
            ["model.experts=null"],
            "without model.experts these keys have no effect: expert_ffn_dim, shared_experts, dense_layers",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_done(
    tiny: Callable[..., Path], tmp_path: Path, overrides: list[str], message: str
) -> None:
    result = headway("train", tiny(model=EXPERTS), *overrides)
    assert result.returncode == 2 and message in result.stderr.replace("\n", " "), result.stderr
    assert not (tmp_path / "runs").exists()
