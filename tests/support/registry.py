"""Models to register: folders as `headway export` writes them, small enough that hundreds are made in a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from headway.models.versions import ModelVersion, Registry, open_registry
from headway.registry.files import files_to_register
from headway.registry.publish import register
from headway.registry.sources import Gathered

#: A proof of a ledger, as a run has it.
PROVEN = {"proven": True, "problems": [], "steps": 10, "rows": 80, "basis": []}


def write_model(folder: Path, seed: int = 0, **files: bytes) -> Path:
    """A model that nobody could run, with every file that a version must have."""
    folder.mkdir(parents=True, exist_ok=True)
    weight = np.random.default_rng(seed).standard_normal((16, 16)).astype(np.float32)
    save_file({"weight": weight}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "seed": seed}), encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def add(registry: Registry, folder: Path, name: str = "model", **known: Any) -> ModelVersion:
    """Register a folder."""
    files, _ = files_to_register(folder)
    found = Gathered(folder, {"kind": "folder", "folder": folder.name}, **known)
    version, _ = register(registry, name, found, files)
    return version


def registry_with(folder: Path, versions: int = 1, **known: Any) -> Registry:
    """A registry below a folder with some versions of one model."""
    registry = open_registry(folder / "registry")
    for seed in range(versions):
        add(registry, write_model(folder / f"model-{seed}", seed), **known)
    return registry
