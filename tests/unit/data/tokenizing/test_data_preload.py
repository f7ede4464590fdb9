"""Loading the fast encoder ahead of time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headway.core.files.hashes import sha256_bytes
from headway.data.tokenizing import preload
from headway.data.tokenizing.compact import compact
from headway.data.tokenizing.encoders import open_encoder
from headway.data.tokenizing.reference_process import Vocabulary
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.data.tokenizing.train import train_on


@pytest.fixture
def folder(tmp_path: Path, documents: Callable[..., list[str]]) -> Path:
    train_on(documents(20), 300).save(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture(autouse=True)
def _nothing_begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What an earlier command of this process began to load and did not take."""
    monkeypatch.setattr(preload, "_loading", None)
    monkeypatch.setattr(preload, "_reference", None)
    yield
    begun = preload.take_reference()
    if begun is not None:
        begun.end()


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a command that has just begun; other tests may have left threads."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)


def test_what_was_loaded_is_used_once(folder: Path) -> None:
    preload.begin_loading_file(folder, "auto")
    tokenizer = Tokenizer.load(folder)
    expected = open_encoder("tokenizers", tokenizer).encode(["some text to compare"])[0].tolist()
    loaded = preload.take_loaded(tokenizer.content)
    ids, _ = loaded.encode_batch_flat(["some text to compare"])
    assert list(memoryview(ids).cast("I")) == expected
    assert preload.take_loaded(tokenizer.content) is None


def test_another_vocabulary_is_not_mistaken_for_it(folder: Path) -> None:
    preload.begin_loading_file(folder / "tokenizer.json", "fastokens")
    assert preload.take_loaded(b"{}") is None
    for path, encoder in ((folder, "tokenizers"), (None, "auto"), (folder / "nothing.json", "auto")):
        preload.begin_loading_file(path, encoder)
        assert preload.take_loaded((folder / "tokenizer.json").read_bytes()) is None


def test_what_cannot_be_loaded_is_left_to_others(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": "nonsense"}))
    preload.begin_loading_file(tmp_path, "auto")
    assert preload.take_loaded((tmp_path / "tokenizer.json").read_bytes()) is None


def test_the_vocabulary_that_a_config_seems_to_name(folder: Path, tmp_path: Path) -> None:
    content, config = (folder / "tokenizer.json").read_bytes(), tmp_path / "run.yaml"

    def loaded(text: str, *overrides: str) -> bool:
        config.write_text(text)
        preload.begin_loading_named(config, overrides)
        return preload.take_loaded(content) is not None

    named = f"data: {{tokenizer: {{path: {folder}}}}}"
    assert loaded(named) and loaded(named, "data.validation=0")
    assert not loaded(named, "data.tokenizer.path=other"), "what comes later decides"
    for wrong in ("", "data: {tokenizer: {path: 3}}", "data: [", "base: quickstart", "data: {tokenizer: bpe}"):
        assert not loaded(wrong), wrong
    preload.begin_loading_named(tmp_path / "nothing.yaml", [])
    assert preload.take_loaded(content) is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no process can be copied here")
@pytest.mark.usefixtures("one_thread")
def test_the_vocabulary_of_a_command_line_that_nobody_has_understood_yet(folder: Path, tmp_path: Path) -> None:
    content, config = (folder / "tokenizer.json").read_bytes(), tmp_path / "run.yaml"
    config.write_text(f"data: {{tokenizer: {{path: {folder}}}}}")

    def loaded(*words: str) -> bool:
        preload.begin_loading_said(words)
        return preload.take_loaded(content) is not None

    assert loaded(str(config)) and loaded("--json", str(config), "data.validation=0", "--force")
    assert not loaded(str(config), "--dry-run") and not loaded(str(config), "data.tokenizer.path=other")
    assert not loaded("--workers", "2", str(config)), "the command itself begins to load it then"
    assert not loaded() and not loaded("--help")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no process can be copied here")
@pytest.mark.usefixtures("one_thread")
def test_where_such_a_look_finds_nothing_the_command_itself_begins(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("base: another")
    preload.begin_loading_said([str(tmp_path / "run.yaml")])
    begun = preload._loading
    assert begun is not None
    begun.join()
    preload.begin_loading_file(folder, "auto")
    assert preload._loading is not begun
    assert preload.take_loaded((folder / "tokenizer.json").read_bytes()) is not None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no process can be copied here")
@pytest.mark.usefixtures("one_thread")
def test_where_no_process_can_be_begun_the_command_itself_begins(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> int:
        raise BlockingIOError("too many processes")

    config = tmp_path / "run.yaml"
    config.write_text(f"data: {{tokenizer: {{path: {folder}}}}}")
    monkeypatch.setattr(os, "fork", full)
    preload.begin_loading_said([str(config)])
    assert preload._loading is None and preload.take_reference() is None
    preload.begin_loading_named(config, [])
    assert preload.take_loaded((folder / "tokenizer.json").read_bytes()) is not None


def test_a_vocabulary_that_changes_meanwhile_is_made_short_anew(folder: Path, tmp_path: Path) -> None:
    changed = tmp_path / "tokenizer.json"
    shutil.copy(folder / "tokenizer.json", changed)

    class Process:
        def vocabulary(self) -> Vocabulary:
            return Vocabulary(changed, sha256_bytes(b"before"), b"of before")

    content = changed.read_bytes()
    preload._begin(lambda: preload._made_short_beside(Process()))  # type: ignore[arg-type]
    assert preload.take_parsed(content) == json.loads(compact(content))
    assert preload.take_loaded(content) is not None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no process can be copied here")
def test_such_a_command_line_begins_the_reference_too(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, config = (folder / "tokenizer.json").read_bytes(), tmp_path / "run.yaml"
    config.write_text(f"data: {{tokenizer: {{path: {folder}}}}}")

    def begun(threads: int, *words: str) -> bool:
        monkeypatch.setattr(threading, "active_count", lambda: threads)
        preload.begin_loading_said(words)
        preload.take_loaded(content)
        reference = preload.take_reference()
        return reference is not None and reference.ask(content, ["text"], []) is not None

    assert begun(1, str(config))
    assert not begun(2, str(config)), "a copy has no other threads, whatever they hold"
    assert not begun(1, str(config), "--dry-run")
    config.write_text(f"data: {{tokenizer: {{path: {folder}, encoder: tokenizers}}}}")
    assert not begun(1, str(config)), "it is the encoder itself"


def test_json_that_was_parsed_ahead_is_that_of_the_same_bytes(folder: Path) -> None:
    content = (folder / "tokenizer.json").read_bytes()
    preload.begin_loading_file(folder, "auto")
    assert preload.take_parsed(content) == json.loads(compact(content))
    assert preload.take_parsed(content) is None, "handed out once"
    assert preload.take_loaded(content) is not None
    preload.begin_loading_file(folder, "auto")
    assert preload.take_parsed(content + b" ") is None
    assert preload.take_loaded(content + b" ") is None


def test_a_command_that_ends_while_it_is_loaded_has_its_own_exit_code(folder: Path, tmp_path: Path) -> None:
    spec = json.loads((folder / "tokenizer.json").read_bytes())
    spec["model"]["vocab"] |= {f"word{number}": 1000 + number for number in range(100_000)}  # takes a while
    (tmp_path / "large.json").write_text(json.dumps(spec))
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from headway.data.tokenizing.preload import begin_loading_file\n"
        "class TakesAWhile:\n"
        "    def __del__(self, sleep=time.sleep): sleep(1)\n"
        "something = TakesAWhile()\n"
        "begin_loading_file(Path('large.json'), 'auto')\n"
        "time.sleep(0.05)\n"
        "sys.exit(3)"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (3, "")
