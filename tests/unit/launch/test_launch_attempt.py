"""How an attempt begins and ends."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.config import load_config
from headway.core.errors import Preempted
from headway.launch import attempt as attempts
from headway.launch.attempt import Wishes, own_attempt, preemptible


def test_a_signal_while_an_attempt_begins_is_its_end(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes after the attempt is on disk, and before the block that would record its end."""

    def interrupted(**facts: Any) -> dict[str, Any]:
        signal.raise_signal(signal.SIGTERM)
        return {}

    monkeypatch.setattr(attempts, "provenance", interrupted)
    config = load_config(tiny())
    with pytest.raises(Preempted, match="SIGTERM"), preemptible(), own_attempt(config, {}, {}, Wishes()):
        pytest.fail("the attempt goes on")
    record = json.loads((config.run_directory / "attempts/001/attempt.json").read_text())
    assert (record["outcome"], record["exit_code"]) == ("preempted", 75)
    assert json.loads((config.run_directory / "run.json").read_text()) == {}
