"""The line for work that tells nothing while it is done."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headway.config.sections.data import SourceConfig
from headway.text.reading.sources import find_sources
from headway.text.tokenizing import train
from headway.text.tokenizing.train import waiting_for


def test_long_work_is_told_again_and_again(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(train, "_FIRST", 0.01)
    monkeypatch.setattr(train, "_LOGGED", 0.01)
    with waiting_for("merging"):
        told = ""
        while told.count("\n") < 2:
            time.sleep(0.01)
            told += capsys.readouterr().err
    assert all(re.fullmatch(r"merging: \d\.\d s so far", line) for line in told.splitlines()) and told.count("\n") >= 2


def test_short_work_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    with waiting_for("merging"):
        pass
    assert capsys.readouterr().err == ""


def test_merges_are_told_from_the_end_of_the_text_to_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    @contextmanager
    def recorded(what: str) -> Iterator[None]:
        told.append(what)
        yield
        told.append("ended")

    monkeypatch.setattr(train, "waiting_for", recorded)
    (tmp_path / "a.txt").write_text("é" * 1024)
    train.train_tokenizer(find_sources([SourceConfig(path=str(tmp_path / "a.txt"))]), 300, 10**6)
    assert told == ["merging 2.0 KiB of text into a vocabulary of 300 tokens", "ended"]
