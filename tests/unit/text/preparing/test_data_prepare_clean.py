"""Cleaning and the search for duplicates as part of preparation."""

from __future__ import annotations

import json
import random
import sys
import types
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from headway.config.sections.data import DataConfig
from headway.core.errors import DataError
from headway.data.store import TokenStore
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.text.inspect import describe_store
from headway.text.preparing.build import Builder
from headway.text.preparing.prepare import prepare
from headway.text.reading import sources as source_module
from support.runs import store_contents

Configs = Callable[..., DataConfig]
Jsonl = Callable[..., Path]

STEPS = [{"step": "unicode"}, {"step": "length", "min_words": 5}, {"step": "pii"}]


def texts_of(store: Path) -> list[str]:
    """All documents of a store, in order."""
    opened = TokenStore.open(store)
    tokenizer = Tokenizer.load(opened.tokenizer_folder)
    texts = []
    for split in opened.splits:
        for source in opened.sources(split):
            bounds = opened.documents(split, source).astype(int).tolist()
            for start, end in pairwise(bounds):
                texts.append(tokenizer.decode(opened.read(split, source, start, end - start)[:-1]))
    return texts


@pytest.fixture
def corpus(tmp_path: Path, documents: Callable[..., list[str]], jsonl: Jsonl) -> list[str]:
    """Two files with short documents, addresses, equal and nearly equal ones; the texts that should stay, sorted."""
    draw = random.Random(1)
    originals = [f"{text} and the {n} more words that make it longer than the others" for n, text in
                 enumerate(documents(60, words=80))]  # fmt: skip
    long = [" ".join(f"word{draw.randrange(10_000)}" for _ in range(200)) for _ in range(10)]
    near = [text.replace(text.split()[100], "changed") for text in long[:5]]
    first = [*originals, "too short", "write to anna.meier@freenet.de for more of the same", *long]
    second = [*originals[10:30], *near, "tiny", "another one that stays where it is"]
    jsonl(tmp_path / "a.jsonl", first)
    jsonl(tmp_path / "b.jsonl", second)
    kept = [*originals, "write to <EMAIL> for more of the same", *long, "another one that stays where it is"]
    return sorted(kept)


def config_for(config: Configs, store: Path, **values: Any) -> DataConfig:
    dedup = {"documents": True, "near": True, "max_removed": 0.9, "max_removed_per_source": 1.0, **values}
    return config(["a.jsonl", "b.jsonl"], store=store, clean=STEPS, dedup=dedup, shard_bytes=4000)


def test_what_should_stay_stays(tmp_path: Path, config: Configs, corpus: list[str]) -> None:
    report = prepare(config_for(config, tmp_path / "store"), workers=1)
    assert sorted(texts_of(tmp_path / "store")) == corpus
    assert report.documents == len(corpus) and report.removed == 99 - len(corpus)
    assert prepare(config_for(config, tmp_path / "store"), workers=1).up_to_date
    facts = describe_store(TokenStore.open(tmp_path / "store"))
    assert facts["duplicates"]["total"]["exact"] == 20 and facts["duplicates"]["total"]["near"] == 5
    steps = {step["name"]: step for step in facts["sources"][0]["clean"]["steps"]}
    assert steps["length"]["documents_in"] - steps["length"]["documents_out"] == 1
    assert steps["pii"]["changed"] == 1
    assert sum(source["read"] for source in facts["sources"]) == 99


def test_bytes_do_not_depend_on_workers_or_pieces(tmp_path: Path, config: Configs, corpus: list[str]) -> None:
    stores = []
    for workers, piece in ((1, 10**6), (2, 1500), (4, 700)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(source_module, "PIECE_BYTES", piece)
            # Units follow pieces: only equal pieces make equal shards, but texts are the same whatever the pieces.
            prepare(config_for(config, tmp_path / f"store{workers}"), workers=workers)
            prepare(config_for(config, tmp_path / f"single{workers}"), workers=1)
        assert store_contents(tmp_path / f"store{workers}") == store_contents(tmp_path / f"single{workers}")
        stores.append(sorted(texts_of(tmp_path / f"store{workers}")))
    assert stores[0] == stores[1] == stores[2] == corpus


def test_a_document_comes_back_when_its_twin_leaves(
    tmp_path: Path, config: Configs, corpus: list[str], jsonl: Jsonl
) -> None:
    prepare(config_for(config, tmp_path / "store"), workers=1)
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    twin = json.loads(lines[15])["text"]
    del lines[15]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    report = prepare(config_for(config, tmp_path / "store"), workers=1)
    texts = texts_of(tmp_path / "store")
    assert texts.count(twin) == 1 and sorted(texts) == corpus and report.documents == len(corpus)


def test_paragraphs_that_repeat_leave(tmp_path: Path, config: Configs, jsonl: Jsonl) -> None:
    footer = (
        "This paragraph stands under every page of the site, word for word, and is of no use to anybody at all here."
    )
    pages = [f"Page {n} has a text of its own, which nobody else has, and goes on so for a while, {n} times."
             for n in range(30)]  # fmt: skip
    jsonl(tmp_path / "a.jsonl", [f"{page}\n\n{footer}" for page in pages])
    dedup = {"paragraphs": True, "max_removed": 0.9}
    prepare(config("a.jsonl", dedup=dedup), workers=1)
    texts = texts_of(tmp_path / "store")
    assert sum(footer in text for text in texts) == 1
    assert all(any(page in text for text in texts) for page in pages)
    assert prepare(config("a.jsonl", dedup=dedup), workers=1).up_to_date


def test_cleaning_that_gives_other_paragraphs_the_second_time_is_told(
    tmp_path: Path, config: Configs, jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "forgetful", raising=False)
    code = "seen = set()\ndef join(text):\n    if text in seen:\n        return text.replace('\\n\\n', ' ')\n"
    (tmp_path / "forgetful.py").write_text(f"{code}    seen.add(text)\n    return text\n")
    jsonl(tmp_path / "a.jsonl", [f"Page {n}.\n\nIt has two paragraphs." for n in range(9)])
    clean, dedup = [{"step": "python", "function": "forgetful:join"}], {"paragraphs": True, "paragraph_bytes": 1}
    with pytest.raises(DataError, match=r"the search for duplicates: the document has 1 paragraphs, not 2") as caught:
        prepare(config("a.jsonl", clean=clean, dedup={**dedup, "max_removed": 0.9}), workers=1)
    assert "begins with 'Page 0. It has" in str(caught.value.where) and "data.clean" in str(caught.value.fix)


def test_too_much_is_refused_and_harms_nothing(tmp_path: Path, config: Configs, jsonl: Jsonl) -> None:
    jsonl(tmp_path / "a.jsonl", [f"document number {n} is like no other one" for n in range(50)])
    prepare(config("a.jsonl", dedup={"documents": True}), workers=1)
    before = store_contents(tmp_path / "store")
    jsonl(tmp_path / "a.jsonl", ["every document says the same"] * 40 + [f"but document {n}" for n in range(10)])
    with pytest.raises(DataError, match="would remove too much") as caught:
        prepare(config("a.jsonl", dedup={"documents": True}), workers=1)
    assert "data.dedup.max_removed=" in str(caught.value.fix)
    assert "every document says the same" in str(caught.value.where) and "a.jsonl" in str(caught.value.where)
    assert store_contents(tmp_path / "store") == before
    accepted = {"documents": True, "max_removed": 0.8, "max_cluster": 0.9}
    assert prepare(config("a.jsonl", dedup=accepted), workers=1).documents == 11


def test_nothing_left_is_an_error(tmp_path: Path, config: Configs, jsonl: Jsonl) -> None:
    jsonl(tmp_path / "a.jsonl", ["short", "shorter"])
    with pytest.raises(DataError, match="cleaning has left nothing of 2 documents"):
        prepare(config("a.jsonl", clean=[{"step": "length", "min_words": 5}]), workers=1)


@pytest.mark.parametrize("limit", ["25 documents", "5 kB"])
def test_a_limit_holds_where_duplicates_are_searched_for(
    tmp_path: Path, config: Configs, documents: Any, jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(source_module, "PIECE_BYTES", 1000)  # so that the limit falls into an early piece of the unit
    jsonl(tmp_path / "a.jsonl", documents(100))
    source = {"path": "a.jsonl", "limit": limit}
    plain = prepare(config([source], store=tmp_path / "plain"), workers=1)
    report = prepare(config([source], dedup={"documents": True}), workers=1)
    assert 20 < plain.documents < 40 and report.documents == plain.documents and report.removed == 0
    assert texts_of(tmp_path / "store") == texts_of(tmp_path / "plain")


def test_files_without_documents_are_cleaned_and_searched_like_others(
    tmp_path: Path, config: Configs, documents: Any, jsonl: Jsonl
) -> None:
    jsonl(tmp_path / "a.jsonl", documents(20))
    (tmp_path / "b.jsonl").touch()
    report = prepare(config_for(config, tmp_path / "store"), workers=1)
    assert report.documents == 20 and report.files == 2


def test_a_function_that_changes_its_mind_after_the_search_ends_the_preparation(
    tmp_path: Path, config: Configs, documents: Any, jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "fickle", raising=False)
    code = "calls = []\ndef keep(text):\n    calls.append(text)\n    return len(calls) <= 20\n"
    (tmp_path / "fickle.py").write_text(code)
    jsonl(tmp_path / "a.jsonl", documents(20))
    steps = [{"step": "python", "function": "fickle:keep"}]
    with pytest.raises(DataError, match="dropped a document that it kept before"):
        prepare(config("a.jsonl", clean=steps, dedup={"documents": True}), workers=1)


def test_a_file_that_changes_during_the_search_for_duplicates_is_noticed(
    tmp_path: Path, config: Configs, documents: Any, jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    jsonl(tmp_path / "a.jsonl", documents(30, seed=1))
    data = config(tmp_path / "a.jsonl", dedup={"documents": True})
    search = Builder._search

    def search_and_change(*arguments: Any) -> Any:
        found = search(*arguments)
        jsonl(tmp_path / "a.jsonl", documents(30, seed=2))
        return found

    monkeypatch.setattr(Builder, "_search", search_and_change)
    with pytest.raises(DataError, match="changed while it was read"):
        prepare(data, workers=1)
    monkeypatch.undo()
    prepare(data, workers=1)
    assert sorted(texts_of(tmp_path / "store")) == sorted(documents(30, seed=2))


def test_a_function_of_a_notebook_cleans_with_several_workers_and_an_edit_cleans_again(
    tmp_path: Path, config: Configs, documents: Any, jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other process finds it, and the file of `__main__` is that of the kernel."""
    launcher = tmp_path / "ipykernel_launcher.py"
    launcher.write_text("start()\n")
    jsonl(tmp_path / "a.jsonl", documents(40))
    data = config("a.jsonl", clean=[{"step": "python", "function": "__main__:keep"}])

    def cell(code: str) -> None:
        main = types.ModuleType("__main__")
        main.__file__ = str(launcher)
        monkeypatch.setitem(sys.modules, "__main__", main)
        exec(compile(code, "<ipython-input-1>", "exec"), vars(main))

    found = []
    for words in (1, 20, 20):
        cell(f"WORDS = {words}\n\ndef keep(text):\n    return len(text.split()) >= WORDS\n")
        prepare(data, workers=2)
        found.append((data.store / "manifest.json").read_bytes())
    lengths = [len(text.split()) for text in documents(40)]
    kept = [len(texts_of(data.store)), sum(length >= 20 for length in lengths)]
    assert found[0] != found[1] == found[2] and kept[0] == kept[1] < len(lengths)
