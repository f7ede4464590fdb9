"""Loading the fast encoder ahead of time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.cli import application
from headway.data.tokenizing import preload
from headway.data.tokenizing.encoders import open_encoder
from headway.data.tokenizing.preload import short_form
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.text.tokenizing.train import train_on


@pytest.fixture
def folder(tmp_path: Path, documents: Callable[..., list[str]]) -> Path:
    train_on(documents(20), 300).save(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture(autouse=True)
def _nothing_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier command of this process began to load and did not take."""
    monkeypatch.setattr(preload, "_loading", None)


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


def test_a_preparation_loads_it_before_its_own_code(folder: Path, tmp_path: Path) -> None:
    content, config = (folder / "tokenizer.json").read_bytes(), str(tmp_path / "run.yaml")
    Path(config).write_text(f"data: {{tokenizer: {{path: {folder}}}}}")

    def loaded(*words: str) -> bool:
        application.begin_loading(words)
        return preload.take_loaded(content) is not None

    assert loaded("data", "prepare", config) and loaded("data", "prepare", "--force", config, "data.validation=0")
    for other in (["data", "prepare"], ["data", "prepare", config, "--dry-run"], ["data", "inspect", config], ["runs"]):
        assert not loaded(*other), other


def test_numpy_starts_no_threads_where_text_is_prepared() -> None:
    """It reads the variable when it is loaded, which is after the variable is set."""
    code = (
        "import sys; import headway.cli.application; assert 'numpy' not in sys.modules; import headway.text.cli;"
        "assert 'numpy' not in sys.modules; import os; print(os.environ['OPENBLAS_NUM_THREADS'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_where_a_guess_finds_no_vocabulary_the_right_one_is_loaded(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("no vocabulary")
    config = tmp_path / "run.yaml"
    config.write_text(f"data: {{tokenizer: {{path: {tmp_path}}}}}")
    preload.begin_loading_named(config, [])
    begun = preload._loading
    assert begun is not None
    begun.join()
    preload.begin_loading_file(folder, "auto")
    assert preload._loading is not begun
    assert preload.take_loaded((folder / "tokenizer.json").read_bytes()) is not None


def test_json_that_was_parsed_ahead_is_that_of_the_same_bytes(folder: Path) -> None:
    content = (folder / "tokenizer.json").read_bytes()
    preload.begin_loading_file(folder, "auto")
    assert preload.take_parsed(content) == short_form(content)
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
