"""Tasks that are made of more than data and a config: a model to continue, adapters on one, a teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headway.config import ModelConfig
from headway.models.build import build_model
from headway.models.huggingface.export import export_model

MADE_OF = ("pretrained", "adapter", "teacher")


def made_of(kind: str, folder: Path, tokenizer: Path) -> dict[str, Any]:
    """Write a tiny model and return the sections of a config whose task is made of it.

    Args:
        kind: One of `MADE_OF`.
        folder: Where the model goes.
        tokenizer: Folder of the tokenizer of the data.
    """
    shape = ModelConfig(dim=16, layers=1, heads=2, ffn_dim=32)
    export_model(build_model(shape, vocab_size=300, seed=1), folder, tokenizer)
    if kind == "teacher":
        return {"distill": {"teacher": str(folder), "weight": 0.5}}
    adapter = {"adapter": {"rank": 2}} if kind == "adapter" else {}
    return {"model": {"from_pretrained": str(folder), **adapter}}
