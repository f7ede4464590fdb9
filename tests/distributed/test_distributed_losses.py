"""A loss of one's own, a teacher and early stopping: several workers end where one does, in its state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.config import ModelConfig
from headway.config.sections.early_stopping import EVALUATIONS
from headway.models.build import build_model
from headway.models.huggingface.export import export_model
from support.runs import headway, manifest

OWN_LOSS = """
from torch.nn import functional as F

def smoothed(logits, batch):
    targets = batch["targets"].flatten()
    return F.cross_entropy(
        logits.flatten(0, 1).float(), targets, ignore_index=-100, label_smoothing=0.1, reduction="sum"
    )
"""

#: No loss is 10 nats below the first one, so the third evaluation ends the run.
EARLY: dict[str, Any] = {
    "train": {"early_stopping": {"patience": 2, "min_delta": 10.0}},
    "evaluation": {"every": "1 steps", "rows": 3},
}


@pytest.fixture
def ended(tiny: Callable[..., Path], corpus: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Trains under a strategy, and returns what the last manifest says of the state and of all evaluations."""
    (tmp_path / "own_loss.py").write_text(OWN_LOSS)
    shape = ModelConfig(dim=16, layers=1, heads=2, ffn_dim=32, init_std=0.3)
    export_model(build_model(shape, vocab_size=300, seed=1), tmp_path / "teacher", corpus / "store/tokenizer")
    known = {
        "loss": {"loss": "own_loss:smoothed"},
        "distill": {"distill": {"teacher": str(tmp_path / "teacher"), "weight": 0.5}},
        "early_stopping": EARLY,
    }

    def train(workers: int, strategy: str, *kinds: str) -> dict[str, Any]:
        sections: dict[str, Any] = {key: section for kind in kinds for key, section in known[kind].items()}
        sections["train"] = {"steps": 5, "lanes": 2, **sections.get("train", {})}
        name = f"{strategy}-{workers}"
        config = tiny(**sections, name=name, parallel={"strategy": strategy}, determinism="elastic")
        done = headway("train", config, "-w", str(workers), cwd=tmp_path, strategies=True)
        assert done.returncode == 0, done.stderr
        found = manifest(tmp_path / "runs" / name)
        step = found["step"]
        assert step == (3 if "early_stopping" in kinds else 5)
        return {"state": found["state_sha256"], "step": step, "evaluations": found["context"].get(EVALUATIONS)}

    return train


def test_workers_with_whole_logits_end_early_where_one_does(ended: Callable[..., dict[str, Any]]) -> None:
    kinds = ("loss", "distill", "early_stopping")
    assert ended(2, "zero3", *kinds) == ended(1, "single", *kinds)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loss", "distill", "early_stopping"])
def test_every_strategy_ends_where_one_worker_does(kind: str, ended: Callable[..., dict[str, Any]]) -> None:
    alone = ended(1, "single", kind)
    assert {name: ended(2, name, kind) for name in ("ddp", "zero1", "zero2", "zero3")} == dict.fromkeys(
        ("ddp", "zero1", "zero2", "zero3"), alone
    )
