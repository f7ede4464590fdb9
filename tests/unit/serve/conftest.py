"""Trained models that tests of serving share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.serve import train_chat

Make = Callable[[str, Callable[[Path], None]], Path]


@pytest.fixture(scope="session")
def chat_run(made_once: Make) -> Path:
    """A run that has learned four conversations; tests only read it."""
    return made_once("serve-chat", train_chat) / "runs" / "tiny"


@pytest.fixture(scope="session")
def other_run(made_once: Make) -> Path:
    """A run of another seed, whose replies are others."""
    return made_once("serve-other", lambda folder: train_chat(folder, seed=8, steps=10)) / "runs" / "tiny"
