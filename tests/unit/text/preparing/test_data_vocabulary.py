"""What comes along with a vocabulary that is given, and how long a trained one stays."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headway.config import load_config
from headway.config.sections.data import DataConfig
from headway.core.console import Progress
from headway.core.errors import DataError
from headway.data.in_use import in_use
from headway.data.store import TokenStore
from headway.data.tokenizing import tokenizer as tokenizer_module
from headway.data.tokenizing.special import SpecialInText
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.text.preparing import inputs, vocabulary
from headway.text.preparing import prepare as prepare_module
from headway.text.preparing.prepare import prepare
from headway.text.reading import sources as source_module
from headway.text.reading.places import SourceFile
from support.runs import write_config, write_corpus

Configs = Callable[..., DataConfig]
Texts = Callable[..., list[str]]
Jsonl = Callable[..., Path]

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def _given(corpus: Path, folder: Path) -> Path:
    """The corpus's tokenizer, as a checkpoint of a chat model has it."""
    shutil.copytree(corpus / "store/tokenizer", folder)
    spec = json.loads((folder / "tokenizer.json").read_bytes())
    last = max(spec["model"]["vocab"].values())
    for number, text in enumerate(("<s>", "<pad>", "<|user|>"), last + 1):
        spec["added_tokens"].append({**spec["added_tokens"][0], "id": number, "content": text})
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return folder


def _prepared(tmp_path: Path, given: Path, store: str) -> TokenStore:
    data = {"store": str(tmp_path / store), "tokenizer": {"path": str(given)}}
    prepare(load_config(write_config(tmp_path, data=data)).data, workers=1)
    return TokenStore.open(tmp_path / store)


def test_what_belongs_to_a_given_tokenizer_comes_along(corpus: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_corpus(tmp_path)
    given = _given(corpus, tmp_path / "given")
    bare = _prepared(tmp_path, given, "bare")
    settings: dict[str, Any] = {
        "tokenizer_class": "LlamaTokenizer",
        "auto_map": {"AutoTokenizer": ["code.Own", None]},
        "bos_token": {"content": "<s>"},
        "pad_token": None,
        "unk_token": "<not in the vocabulary>",
        "eos_token": bare.manifest["tokenizer"]["end_of_text"],
        "additional_special_tokens": ["<|user|>"],
        "model_max_length": 4096,
    }
    (given / "tokenizer_config.json").write_text(json.dumps(settings))
    (given / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<pad>"}))
    (given / "chat_template.jinja").write_text(TEMPLATE)
    store = _prepared(tmp_path, given, "store")
    assert (store.fingerprint, store.tokenizer_fingerprint) == (bare.fingerprint, bare.tokenizer_fingerprint)
    config = json.loads((store.tokenizer_folder / "tokenizer_config.json").read_text())
    assert config == {
        **json.loads((bare.tokenizer_folder / "tokenizer_config.json").read_text()),
        "bos_token": "<s>",
        "pad_token": "<pad>",
        "additional_special_tokens": ["<|user|>"],
        "model_max_length": 4096,
        "chat_template": TEMPLATE,
    }
    loaded = transformers.AutoTokenizer.from_pretrained(store.tokenizer_folder)
    ours = Tokenizer.load(store.tokenizer_folder)
    assert len(loaded) == ours.vocab_size and loaded.bos_token == "<s>" and loaded.model_max_length == 4096
    assert loaded("red stone")["input_ids"] == ours.encode_batch(["red stone"])[0]
    assert loaded.apply_chat_template([{"role": "user", "content": "red"}], tokenize=False) == "red"


def test_shards_whose_text_has_become_special_tokens_are_made_anew(
    tmp_path: Path, config: Configs, jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"type": "WordLevel", "vocab": {"<unk>": 0, "</s>": 1, "a": 2}, "unk_token": "<unk>"}
    (tmp_path / "given").mkdir()
    spec = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    (tmp_path / "given/tokenizer.json").write_text(json.dumps(spec))
    jsonl(tmp_path / "a.jsonl", ["a </s> a"])
    data = config("a.jsonl", tokenizer={"path": "given"})
    with monkeypatch.context() as patch:
        nothing = SpecialInText(*[frozenset()] * 3)
        patch.setattr(tokenizer_module, "special_in_text", lambda *_: nothing)
        prepare(data, workers=1)
    assert TokenStore.open(data.store).read("train", "a", 0, 4).tolist() == [2, 1, 2, 1]
    assert not prepare(data, workers=1).up_to_date
    assert TokenStore.open(data.store).read("train", "a", 0, 4).tolist() == [2, 0, 2, 1]
    assert prepare(data, workers=1).up_to_date


def test_settings_beside_a_given_tokenizer_come_along_when_nothing_else_has_changed(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path)
    given = _given(corpus, tmp_path / "given")
    store = _prepared(tmp_path, given, "store")
    file = store.path / vocabulary.SETTINGS
    capsys.readouterr()
    with in_use(store.path):  # a training reads shards; of the tokenizer it has a copy
        (given / "chat_template.jinja").write_text(TEMPLATE)
        again = _prepared(tmp_path, given, "store")
    assert json.loads(file.read_bytes())["chat_template"] == TEMPLATE and again.fingerprint == store.fingerprint
    assert "is written again" in capsys.readouterr().err
    good = file.read_bytes()
    for damaged in ("{", "[]", "{}", '{"eos_token": "<pad>"}'):
        file.write_text(damaged)
        assert [problem.split(":")[0] for problem in store.verify()] == [vocabulary.SETTINGS]
    _prepared(tmp_path, given, "store")
    assert file.read_bytes() == good and store.verify() == []
    capsys.readouterr()
    stamp = file.stat().st_mtime_ns
    _prepared(tmp_path, given, "store")
    assert file.stat().st_mtime_ns == stamp and "anew" not in capsys.readouterr().err


def test_settings_beside_a_trained_tokenizer_may_be_ones_own(
    tmp_path: Path, config: Configs, documents: Texts, jsonl: Jsonl
) -> None:
    jsonl(tmp_path / "a.jsonl", documents(5))
    data = config("a.jsonl")
    prepare(data, workers=1)
    file = data.store / vocabulary.SETTINGS
    good = file.read_bytes()
    file.write_text(json.dumps({**json.loads(good), "chat_template": TEMPLATE}))
    prepare(data, workers=1)
    assert json.loads(file.read_bytes())["chat_template"] == TEMPLATE
    file.unlink()
    prepare(data, workers=1)
    assert file.read_bytes() == good


def _vocabulary(data: DataConfig, **values: Any) -> str:
    """That of the store as it is once it has been prepared."""
    data = data.model_copy(update=values)
    prepare(data, workers=1)
    return TokenStore.open(data.store).tokenizer_fingerprint


def test_a_trial_behind_a_limit_costs_the_full_run_nothing(
    tmp_path: Path, config: Configs, documents: Texts, jsonl: Jsonl, capsys: pytest.CaptureFixture[str]
) -> None:
    jsonl(tmp_path / "a.jsonl", documents(300))
    trial, full = ({"path": "a.jsonl", "limit": limit} for limit in ("5 documents", "1 MB"))
    first = _vocabulary(config([trial]))
    assert _vocabulary(config([trial])) == first  # its own does
    then = _vocabulary(config([full]))
    assert "of text, under a limit that has changed since" in capsys.readouterr().err
    assert then == _vocabulary(config([full], store=tmp_path / "fresh")) != first


def test_a_vocabulary_that_has_seen_enough_stays_whatever_the_limit(
    tmp_path: Path, config: Configs, documents: Texts, jsonl: Jsonl
) -> None:
    jsonl(tmp_path / "a.jsonl", documents(300))
    tokenizer = {"vocab_size": 300, "training_bytes": 5000}
    less, more = ({"path": "a.jsonl", "limit": limit} for limit in ("10 documents", "200 documents"))
    first = _vocabulary(config([less], tokenizer=tokenizer))
    assert _vocabulary(config([more], tokenizer=tokenizer)) == first
    assert _vocabulary(config([more], tokenizer=tokenizer, store=tmp_path / "fresh")) != first


def test_a_growing_file_keeps_the_vocabulary(
    tmp_path: Path, config: Configs, documents: Texts, jsonl: Jsonl, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = documents(20)
    jsonl(tmp_path / "a.jsonl", texts)
    first = _vocabulary(config("a.jsonl"))
    texts.append("zebra crossing " * 40)
    jsonl(tmp_path / "a.jsonl", texts)
    assert _vocabulary(config("a.jsonl")) == first
    assert "trains another" not in capsys.readouterr().err
    jsonl(tmp_path / "a.jsonl", [*texts, *documents(300, seed=1)])
    assert _vocabulary(config("a.jsonl")) == first
    assert "when there was far less input: --force trains another" in capsys.readouterr().err
    # What is read otherwise, or begins otherwise, is another file.
    jsonl(tmp_path / "b.jsonl", texts)
    second = _vocabulary(config("b.jsonl", store=tmp_path / "second"))
    jsonl(tmp_path / "b.jsonl", [*texts, "zebra crossing " * 40])
    template = {"path": "b.jsonl", "template": "{text}!?"}
    assert _vocabulary(config([template], store=tmp_path / "second")) != second
    capsys.readouterr()
    jsonl(tmp_path / "a.jsonl", ["zebra crossing " * 40, *texts, *documents(400, seed=2)])
    assert _vocabulary(config("a.jsonl")) != first
    assert "a new vocabulary is trained: data.tokenizer, or all of the input" in capsys.readouterr().err


def test_a_file_that_was_empty_has_not_grown(tmp_path: Path, config: Configs) -> None:
    for name, text in (("a.txt", ""), ("b.txt", "red stone river " * 9)):
        (tmp_path / name).write_text(text)
    first = _vocabulary(config("*.txt", validation=0))
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("blue cloud tower " * 9 + name)
    assert _vocabulary(config("*.txt", validation=0)) != first


@pytest.mark.parametrize("change", ["the limit", "the text", "the size of documents"])
def test_a_vocabulary_that_was_begun_for_other_text_is_not_taken(
    tmp_path: Path, config: Configs, jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    jsonl(tmp_path / "a.jsonl", ["red stone river " * 9, "blue cloud tower " * 90])
    limits = ("1 document", "2 documents") if change == "the limit" else ("2 documents", "2 documents")
    sizes = (1000, 5000) if change == "the size of documents" else (5000, 5000)
    before, after = (
        config([{"path": "a.jsonl", "limit": limit}], validation=0, max_document_bytes=size, bad_documents="skip")
        for limit, size in zip(limits, sizes, strict=True)
    )

    def killed(*_: Any) -> None:
        raise DataError("killed")

    with monkeypatch.context() as patch, pytest.raises(DataError, match="killed"):
        patch.setattr(prepare_module, "publish", killed)
        prepare(before, workers=1)
    begun = Tokenizer.load(tmp_path / ".store.preparing" / "tokenizer").fingerprint
    if change == "the text":
        jsonl(tmp_path / "a.jsonl", ["der stone river " * 9, "lube cloud tower " * 9])
    assert _vocabulary(after) == _vocabulary(after, store=tmp_path / "fresh") != begun


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the input that were read to be hashed, each time."""
    sizes: list[int] = []
    hash_lines = inputs._hash_lines

    def counted(file: SourceFile, lines: tuple[int, int] | None, most: int) -> str:
        sizes.append(lines[1] - lines[0] if lines else file.bytes)
        return hash_lines(file, lines, most)

    monkeypatch.setattr(inputs, "_hash_lines", counted)
    return sizes


@pytest.mark.parametrize("change", [{"field": "other"}, {"template": "{text} {other}"}])
def test_what_is_read_otherwise_is_hashed_no_further_than_the_limit(
    tmp_path: Path,
    config: Configs,
    documents: Texts,
    jsonl: Jsonl,
    hashed: list[int],
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, str],
) -> None:
    monkeypatch.setattr(source_module, "PIECE_BYTES", 1000)
    jsonl(tmp_path / "a.jsonl", documents(300), other="other words")
    source = {"path": "a.jsonl", "limit": "5 documents"}
    first = _vocabulary(config([source], shard_bytes=1000))
    hashed.clear()
    assert _vocabulary(config([{**source, **change}], shard_bytes=1000)) != first
    assert 0 < sum(hashed) <= 4000 < (tmp_path / "a.jsonl").stat().st_size / 10


def test_a_file_is_compared_with_the_store_where_its_name_and_length_are_as_they_were_and_that_is_shown(
    tmp_path: Path, config: Configs, documents: Texts, jsonl: Jsonl, bars_of: Callable[[ModuleType], list[Progress]]
) -> None:
    bars = bars_of(vocabulary)
    shorter = documents(19, seed=1)
    before = _vocabulary(config(jsonl(tmp_path / "a.jsonl", documents(20))))
    for texts, is_compared in ((shorter, False), ([text[::-1] for text in shorter], True)):
        file = jsonl(tmp_path / "a.jsonl", texts)
        now = _vocabulary(config(file))
        assert now != before and bars[-1].done == is_compared * file.stat().st_size
        before = now
    assert len(bars) == 2
