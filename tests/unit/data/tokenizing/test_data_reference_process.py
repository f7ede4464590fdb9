"""The reference in a copy of a process: its answers, and that nothing but time is lost without it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from headway.core.errors import DataError
from headway.data.tokenizing import encoders, preload, reference_process
from headway.data.tokenizing.compact import compact
from headway.data.tokenizing.edge_case_texts import edge_case_texts
from headway.data.tokenizing.encoders import choose_encoder
from headway.data.tokenizing.reference_process import ReferenceProcess
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.data.tokenizing.train import train_on
from waits import LONG

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no process can be copied here")


@pytest.fixture
def tokenizer(tmp_path: Path, documents: Callable[..., list[str]]) -> Tokenizer:
    train_on(documents(20), 300).save(tmp_path)
    return Tokenizer.load(tmp_path)


def _begun(file: Path | str) -> ReferenceProcess:
    return ReferenceProcess(lambda: Path(file))


def _is_gone(process: ReferenceProcess) -> bool:
    try:
        os.kill(process._pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_it_says_what_the_reference_would(tokenizer: Tokenizer) -> None:
    texts = [*edge_case_texts([tokenizer.end_of_text]), f"said {tokenizer.end_of_text} as text"]
    process = _begun(tokenizer.where)
    answer = process.ask(tokenizer.content, texts, [tokenizer.end_of_text, "no such token"])
    assert answer is not None and _is_gone(process)
    assert answer.ids == tokenizer.encode_batch(texts)
    assert answer.numbers == {tokenizer.end_of_text: tokenizer.end_of_text_id, "no such token": None}


def test_it_first_makes_its_vocabulary_short(tokenizer: Tokenizer, tmp_path: Path) -> None:
    process = _begun(tokenizer.where)
    vocabulary = process.vocabulary()
    assert vocabulary is not None and vocabulary == process.vocabulary(), "whoever asks, however often"
    assert vocabulary.file == Path(tokenizer.where) and vocabulary.short == compact(tokenizer.content)
    assert vocabulary.is_of(tokenizer.content) and not vocabulary.is_of(tokenizer.content + b" ")
    assert process.ask(tokenizer.content, ["text"], []) is not None
    for none in (_begun(tmp_path / "nowhere.json"), ReferenceProcess(lambda: None)):
        assert none.vocabulary() is None
        none.end()


def test_what_is_cut_off_is_none(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(pipe: BinaryIO, message: list[Any], more: bytes = b"") -> None:
        pipe.write(json.dumps(message).encode() + b"\n" + more[:100])
        pipe.flush()
        os._exit(0)

    monkeypatch.setattr(reference_process, "_send", cut)
    process = _begun(tokenizer.where)
    assert process.vocabulary() is None and process.ask(tokenizer.content, ["text"], []) is None


def test_of_another_vocabulary_it_says_nothing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    process = _begun(tokenizer.where)
    assert process.ask(tokenizer.content + b" ", ["text"], []) is None and _is_gone(process)
    (tmp_path / "none.json").write_text("{}")
    process = _begun(tmp_path / "none.json")
    assert process.ask(b"{}", ["text"], []) is None and _is_gone(process)
    process = _begun(tmp_path / "nowhere.json")
    assert process.ask(tokenizer.content, ["text"], []) is None and _is_gone(process)


def test_a_text_that_is_not_unicode_is_left_to_this_process(tokenizer: Tokenizer) -> None:
    process = _begun(tokenizer.where)
    assert process.ask(tokenizer.content, ["half of a pair: \ud800"], []) is None and _is_gone(process)


def test_it_ends_with_who_began_it(tokenizer: Tokenizer) -> None:
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from headway.data.tokenizing.reference_process import ReferenceProcess\n"
        f"process = ReferenceProcess(lambda: Path({tokenizer.where!r}))\n"
        "os._exit(3)\n"
    )
    # Its standard output, which the copy has too, is read to the end: that is when both have ended.
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=LONG).returncode == 3


@pytest.fixture
def begun(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> ReferenceProcess:
    """The one that a command has begun, and what else it loads ahead."""
    process = _begun(tokenizer.where)
    monkeypatch.setattr(preload, "_reference", process)
    monkeypatch.setattr(preload, "_loading", None)
    monkeypatch.setattr(encoders, "_last", None)
    return process


@pytest.fixture
def no_reference_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError("the reference is loaded in this process")

    monkeypatch.setattr(Tokenizer, "_open_backend", loaded)


@pytest.mark.usefixtures("no_reference_here")
def test_an_encoder_is_compared_with_its_answer(tokenizer: Tokenizer, begun: ReferenceProcess) -> None:
    assert choose_encoder(tokenizer, "auto", ["some text"]) == "fastokens"
    assert _is_gone(begun) and preload.take_reference() is None


@pytest.mark.usefixtures("no_reference_here")
def test_an_encoder_that_differs_from_its_answer_is_not_taken(
    tokenizer: Tokenizer, begun: ReferenceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = encoders._Fastokens._encode

    def wrong(self: encoders._Fastokens, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, lengths = right(self, texts)
        return ids[::-1], lengths

    monkeypatch.setattr(encoders._Fastokens, "_encode", wrong)
    with pytest.raises(DataError, match="fastokens does not encode as `tokenizers` does"):
        choose_encoder(tokenizer, "fastokens", ["some text"])


@pytest.mark.usefixtures("no_reference_here")
def test_a_gap_that_it_finds_is_refused(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = json.loads(tokenizer.content)
    for token in spec["added_tokens"]:
        token["id"] += 500
        spec["model"]["vocab"].pop(token["content"], None)
    file = tmp_path / "gap.json"
    file.write_text(json.dumps(spec))
    monkeypatch.setattr(preload, "_reference", _begun(file))
    with pytest.raises(DataError, match="ids have a gap"):
        choose_encoder(Tokenizer.load(file), "auto", ["some text"])


@pytest.mark.parametrize("how", ["killed", "special tokens"])
def test_without_its_answer_the_reference_is_loaded_here(
    tokenizer: Tokenizer, begun: ReferenceProcess, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[bool] = []
    open_backend = Tokenizer._open_backend

    def seen(self: Tokenizer, special_tokens_in_text: bool) -> object:
        opened.append(special_tokens_in_text)
        return open_backend(self, special_tokens_in_text)

    monkeypatch.setattr(Tokenizer, "_open_backend", seen)
    if how == "killed":
        os.kill(begun._pid, signal.SIGKILL)
    special = how == "special tokens"
    assert choose_encoder(tokenizer, "auto", ["some text"], special) == "fastokens"
    assert opened == [special] and _is_gone(begun)
