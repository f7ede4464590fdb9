"""A store that is brought up to date: only what changed is read, and the result is that of a fresh start."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.config.sections.data import DataConfig
from headway.core.errors import ConfigError, DataError
from headway.data.store import TokenStore
from headway.text.preparing import prepare as prepare_module
from headway.text.preparing.build import Builder
from headway.text.preparing.prepare import prepare
from headway.text.preparing.report import PrepareReport
from headway.text.preparing.units import units_of
from headway.text.reading import sources as source_module
from support.runs import store_contents

Configs = Callable[..., DataConfig]
Texts = Callable[..., list[str]]


@pytest.fixture
def corpus(tmp_path: Path, documents: Texts) -> Path:
    """Forty small files."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, text in enumerate(documents(40)):
        (folder / f"{number:02d}.txt").write_text(text)
    return folder


@pytest.fixture
def update(tmp_path: Path, config: Configs, corpus: Path) -> Callable[..., PrepareReport]:
    """Prepare with a given tokenizer; the store must equal one from a fresh start."""
    prepare(config(corpus, store=tmp_path / "first"), workers=1)
    given = {"path": tmp_path / "first" / "tokenizer"}

    def run(**values: Any) -> PrepareReport:
        values = {"tokenizer": given, "shard_bytes": 800, **values}
        report = prepare(config(corpus, **values), workers=1)
        shutil.rmtree(tmp_path / "fresh", ignore_errors=True)
        fresh = prepare(config(corpus, **values, store=tmp_path / "fresh"), workers=1)
        assert store_contents(tmp_path / "store") == store_contents(tmp_path / "fresh")
        assert report.fingerprint == fresh.fingerprint and fresh.processed_bytes == fresh.input_bytes
        assert TokenStore.open(tmp_path / "store").verify() == []
        return report

    return run


def test_only_what_changed_is_read(
    tmp_path: Path, corpus: Path, update: Callable[..., PrepareReport], documents: Texts
) -> None:
    first = update()
    assert first.processed_bytes == first.input_bytes and not first.up_to_date
    inodes = {file.name: file.stat().st_ino for file in (tmp_path / "store").rglob("*.bin")}
    assert len(inodes) > 8
    (corpus / "17.txt").write_text(documents(1, seed=5)[0])
    changed = update()
    assert 0 < changed.processed_bytes < first.input_bytes / 3
    kept = {file.name for file in (tmp_path / "store").rglob("*.bin") if inodes.get(file.name) == file.stat().st_ino}
    assert len(kept) > len(inodes) / 2
    (corpus / "20b.txt").write_text(documents(1, seed=6)[0])
    added = update()
    assert 0 < added.processed_bytes < first.input_bytes / 3 and added.documents == 41
    (corpus / "03.txt").unlink()
    removed = update()
    assert removed.processed_bytes < first.input_bytes / 3 and removed.documents == 40
    assert update().up_to_date


@pytest.mark.slow
def test_a_unit_without_its_file_leaves(tmp_path: Path, corpus: Path, update: Callable[..., PrepareReport]) -> None:
    update(shard_bytes=1)  # every file is a unit
    text = (corpus / "39.txt").read_bytes()
    (corpus / "39.txt").unlink()
    report = update(shard_bytes=1)
    assert not report.up_to_date and report.processed_bytes == 0 and report.documents == 39
    (corpus / "39.txt").write_bytes(text)
    assert update(shard_bytes=1).processed_bytes == len(text)


def test_settings_that_matter_are_seen(update: Callable[..., PrepareReport]) -> None:
    update()
    assert update(validation=0.3).processed_bytes
    assert update(validation=0.3, bad_documents="skip").processed_bytes
    assert update(validation=0.3, bad_documents="skip", workers=4).up_to_date


def test_another_end_of_text_is_seen(tmp_path: Path, config: Configs, corpus: Path) -> None:
    prepare(config(corpus, store=tmp_path / "first"), workers=1)
    given = shutil.copytree(tmp_path / "first" / "tokenizer", tmp_path / "given")
    content = json.loads((given / "tokenizer.json").read_bytes())
    number = len(content["model"]["vocab"])
    content["added_tokens"].append({**content["added_tokens"][0], "id": number, "content": "<|im_end|>"})
    (given / "tokenizer.json").write_text(json.dumps(content))
    for name in ("<|endoftext|>", "<|im_end|>"):
        (given / "tokenizer_config.json").write_text(json.dumps({"eos_token": name}))
        prepare(config(corpus, tokenizer={"path": given}), workers=1)
        store = TokenStore.open(tmp_path / "store")
        ends = store.documents("train", "corpus")[1:].astype(int) - 1
        assert store.manifest["tokenizer"]["end_of_text"] == name
        assert {int(store.read("train", "corpus", end, 1)[0]) for end in ends.tolist()} == {store.end_of_text_id}


def test_a_damaged_shard_is_made_again(tmp_path: Path, update: Callable[..., PrepareReport]) -> None:
    first = update()
    shard = sorted((tmp_path / "store" / "train").rglob("*.bin"))[0]
    os.truncate(shard, shard.stat().st_size - 2)
    again = update()
    assert 0 < again.processed_bytes < first.input_bytes / 3


def test_lines_added_to_a_large_file_cost_only_its_end(
    tmp_path: Path, config: Configs, documents: Texts, jsonl: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "PIECE_BYTES", 1000)
    texts = documents(100)
    jsonl(tmp_path / "a.jsonl", texts)
    first = prepare(config("a.jsonl", shard_bytes=4000), workers=1)
    jsonl(tmp_path / "a.jsonl", [*texts, "one more line"])
    report = prepare(config("a.jsonl", shard_bytes=4000), workers=1)
    assert report.documents == 101
    assert 0 < report.processed_bytes <= 5000 < first.input_bytes / 3
    # The vocabulary stays, though one trained on the new text would be another.
    tokenizer = {"path": tmp_path / "store" / "tokenizer"}
    prepare(config("a.jsonl", shard_bytes=4000, tokenizer=tokenizer, store=tmp_path / "fresh"), workers=1)
    for split in ("train", "validation"):
        assert {n: b for n, b in store_contents(tmp_path / "store").items() if n.startswith(split)} == {
            n: b for n, b in store_contents(tmp_path / "fresh").items() if n.startswith(split)
        }


def test_a_vocabulary_stays_when_sources_move_and_others_come(
    tmp_path: Path, config: Configs, corpus: Path, documents: Texts, jsonl: Callable[..., Path]
) -> None:
    prepare(config(corpus), workers=1)
    before = TokenStore.open(tmp_path / "store").tokenizer_fingerprint
    moved = corpus.rename(tmp_path / "moved")
    (moved / "more.txt").write_text("zebra crossing " * 40)
    jsonl(tmp_path / "others.jsonl", ["a quagga is no zebra " * 20, *documents(5)])
    report = prepare(config([moved, tmp_path / "others.jsonl"]), workers=1)
    assert report.documents == 47 and TokenStore.open(tmp_path / "store").tokenizer_fingerprint == before
    template = {"path": str(tmp_path / "others.jsonl"), "template": "{text}!"}
    prepare(config([template]), workers=1)
    assert TokenStore.open(tmp_path / "store").tokenizer_fingerprint != before


def test_another_corpus_gets_a_vocabulary_of_its_own(tmp_path: Path, config: Configs, corpus: Path) -> None:
    prepare(config(corpus), workers=1)
    for file in corpus.iterdir():
        file.write_text("zebra crossing " * 40 + file.name)
    prepare(config(corpus), workers=1)
    prepare(config(corpus, store=tmp_path / "fresh"), workers=1)
    assert store_contents(tmp_path / "store") == store_contents(tmp_path / "fresh")


@pytest.fixture
def interrupted(tmp_path: Path, config: Configs, corpus: Path) -> Callable[..., None]:
    """Begin a preparation that ends at its last file, with finished work left for the next."""

    def run(**values: Any) -> None:
        (corpus / "zz.txt").write_bytes(b"not \xff UTF-8")
        with pytest.raises(DataError, match="not valid UTF-8"):
            prepare(config(corpus, shard_bytes=800, **values), workers=1)
        assert list((tmp_path / ".store.preparing").rglob("*.bin"))

    return run


def test_force_trains_a_vocabulary_though_one_was_kept_by_a_preparation_that_was_interrupted(
    tmp_path: Path, config: Configs, corpus: Path, documents: Texts, interrupted: Callable[..., None]
) -> None:
    prepare(config(corpus), workers=1)
    for number in range(10):
        (corpus / f"new{number}.txt").write_text("zebra crossing " * 40 + str(number))
    interrupted()
    skipping = {"bad_documents": "skip", "shard_bytes": 800}
    forced = prepare(config(corpus, **skipping), workers=1, force=True)
    assert forced.fingerprint == prepare(config(corpus, **skipping, store=tmp_path / "fresh"), workers=1).fingerprint


def test_a_vocabulary_is_not_taken_for_the_one_of_another_preparation(
    tmp_path: Path, config: Configs, corpus: Path, interrupted: Callable[..., None]
) -> None:
    interrupted()  # trains one
    prepare(config(corpus, tokenizer={"vocab_size": 270}, store=tmp_path / "other", bad_documents="skip"), workers=1)
    interrupted(tokenizer={"path": tmp_path / "other" / "tokenizer"})
    report = prepare(config(corpus, bad_documents="skip"), workers=1)
    fresh = prepare(config(corpus, bad_documents="skip", store=tmp_path / "fresh"), workers=1)
    assert report.fingerprint == fresh.fingerprint


def test_a_given_vocabulary_is_not_taken_for_one_whose_training_was_interrupted(
    tmp_path: Path, config: Configs, corpus: Path
) -> None:
    given = {"path": tmp_path / "given" / "tokenizer"}
    prepare(config(corpus, tokenizer={"vocab_size": 270}, store=tmp_path / "given"), workers=1)
    (corpus / "99.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="UTF-8"):
        prepare(config(corpus, shard_bytes=800), workers=1)
    (tmp_path / ".store.preparing" / "tokenizer" / ".tokenizer.json.1.tmp").touch()  # of a kill
    prepare(config(corpus, tokenizer=given, bad_documents="skip", shard_bytes=800), workers=1)
    assert {file.name for file in (tmp_path / "store" / "tokenizer").iterdir()} == {
        "tokenizer.json",
        "tokenizer_config.json",
    }
    prepare(config(corpus, bad_documents="skip", shard_bytes=800), workers=1)
    assert TokenStore.open(tmp_path / "store").vocab_size == 300


def test_a_forced_preparation_that_was_interrupted_costs_the_store_no_vocabulary(
    tmp_path: Path, config: Configs, corpus: Path, documents: Texts
) -> None:
    prepare(config(corpus, shard_bytes=800), workers=1)
    before = TokenStore.open(tmp_path / "store").tokenizer_fingerprint
    for number, text in enumerate(documents(40, seed=7)):
        (corpus / f"{number + 40}.txt").write_text(text.upper())
    (corpus / "99.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="UTF-8"):
        prepare(config(corpus, shard_bytes=800), workers=1, force=True)
    (corpus / "99.txt").write_text("9")
    prepare(config(corpus, shard_bytes=800), workers=1)
    assert TokenStore.open(tmp_path / "store").tokenizer_fingerprint == before


@pytest.mark.parametrize("file", ["inputs.json", "tokenizer/tokenizer.json"])
@pytest.mark.parametrize("given", [True, False])
def test_what_is_damaged_beside_the_shards_is_made_good(
    tmp_path: Path, config: Configs, corpus: Path, file: str, given: bool
) -> None:
    prepare(config(corpus, store=tmp_path / "first"), workers=1)
    data = config(corpus, tokenizer={"path": tmp_path / "first" / "tokenizer"} if given else {"vocab_size": 300})
    before = prepare(data, workers=1)
    (tmp_path / "store" / file).write_text("{")
    if not given and file != "inputs.json":
        with pytest.raises(DataError, match="the vocabulary that was trained for the store is damaged"):
            prepare(data, workers=1)
        return
    again = prepare(data, workers=1)
    assert again.fingerprint == before.fingerprint and again.processed_bytes == 0 and not again.up_to_date
    assert TokenStore.open(tmp_path / "store").verify() == []


@pytest.mark.parametrize(("limit", "expected"), [("25 documents", 25), ("1000 bytes", None)])
def test_a_limit_reads_no_further(
    tmp_path: Path, config: Configs, documents: Texts, jsonl: Callable[..., Path], limit: str, expected: int | None
) -> None:
    texts = documents(100)
    jsonl(tmp_path / "a.jsonl", texts)
    data = config([{"path": "a.jsonl", "limit": limit}], validation=0, shard_bytes=2000)
    stores = []
    for workers, piece in ((1, 700), (3, 2500), (2, 10**6)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(source_module, "PIECE_BYTES", piece)
            report = prepare(data.model_copy(update={"store": tmp_path / f"store{piece}"}), workers=workers)
        stores.append(report.documents)
    if expected is None:
        sizes = [len(text.encode()) for text in texts]
        expected = max(n for n in range(100) if sum(sizes[:n]) <= 1000)
    assert stores == [expected] * 3


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("dedup", [{}, {"documents": True}])
@pytest.mark.parametrize("limit", ["10 documents", "600 bytes"])
def test_what_is_malformed_behind_a_limit_is_nobodys_business(
    tmp_path: Path,
    config: Configs,
    jsonl: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
    dedup: dict[str, bool],
    limit: str,
) -> None:
    monkeypatch.setattr(source_module, "PIECE_BYTES", 400)  # so that it is met in the limit's piece and in later ones
    texts = [f"{number:060}" for number in range(30)]
    lines = jsonl(tmp_path / "a.jsonl", texts).read_text().splitlines()
    (tmp_path / "a.jsonl").write_text("\n".join([*lines[:10], "{", *lines[10:12], "{", *lines[12:], "{"]))
    source = {"path": str(tmp_path / "a.jsonl"), "limit": limit}
    for bad in ("fail", "skip"):
        report = prepare(config([source], bad_documents=bad, dedup=dedup), workers=workers)
        assert (report.documents, report.skipped) == (10, 0)
    more = {**source, "limit": limit.replace("10", "11").replace("600", "660")}
    with pytest.raises(DataError, match="not valid JSON") as error:
        prepare(config([more], dedup=dedup), workers=workers)
    assert error.value.where == f"{tmp_path / 'a.jsonl'}:11"
    report = prepare(config([more], bad_documents="skip", dedup=dedup), workers=workers)
    assert (report.documents, report.skipped) == (11, 1)


def test_units_do_not_move_when_a_file_comes(tmp_path: Path, config: Configs, documents: Texts) -> None:
    from headway.text.reading.sources import find_sources

    folder = tmp_path / "many"
    folder.mkdir()
    for number, text in enumerate(documents(300)):
        (folder / f"file{number:03d}.txt").write_text(text)

    def names() -> set[tuple[str, ...]]:
        (source,) = find_sources(config(folder).sources)
        return {tuple(piece.file.name for piece in unit.pieces) for unit in units_of(0, source, 3000)}

    before = names()
    assert 10 < len(before) < 60
    (folder / "file1000.txt").write_text("new")
    assert len(before - names()) <= 1


def test_a_file_that_vanishes_half_way_is_named(
    tmp_path: Path, config: Configs, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headway.text.preparing.encode import PieceWorker

    process = PieceWorker.process

    def process_and_remove(*arguments: Any) -> Any:
        result = process(*arguments)
        (corpus / "30.txt").unlink(missing_ok=True)
        return result

    monkeypatch.setattr(PieceWorker, "process", process_and_remove)
    with pytest.raises(DataError, match=r"cannot be read|changed while") as caught:
        prepare(config(corpus, shard_bytes=800), workers=1)
    assert "30.txt" in str(caught.value.where)
    monkeypatch.undo()
    assert prepare(config(corpus, shard_bytes=800), workers=1).documents == 39


@pytest.mark.parametrize("dedup", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_documents_of_a_stream_do_not_stay_in_memory(
    config: Configs, documents: Texts, monkeypatch: pytest.MonkeyPatch, again: bool, dedup: bool
) -> None:
    """Not those that were encoded, not those whose shards were there, nor those that are searched for duplicates."""
    held: list[int] = []

    def watch(where: Any, name: str, outcomes_of: Callable[..., Any]) -> None:
        function = getattr(where, name)

        def look(*given: Any) -> Any:
            pieces = [piece for outcome in outcomes_of(*given) for piece in outcome.unit.pieces]
            held.append(sum(len(piece.texts or ()) for piece in pieces if isinstance(piece.texts, tuple)))
            return function(*given)

        monkeypatch.setattr(where, name, look)

    watch(Builder, "_search", lambda builder, outcomes: outcomes)
    watch(prepare_module, "inputs_json", lambda data, sources, outcomes, *more: outcomes)
    data = config({"path": "python:", "name": "x"}, shard_bytes=2000, dedup={"documents": dedup})
    for count in (200, 201) if again else (200,):
        report = prepare(data, workers=1, iterables={"x": documents(count)})
        assert report.documents == count
    assert set(held) == {0}


def test_malformed_documents_are_listed_in_order_and_do_not_stay_in_memory(
    tmp_path: Path, config: Configs, jsonl: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of units that are known already too."""
    held: list[int] = []
    run = Builder.run

    def look(builder: Builder, bound: int) -> Any:
        outcomes = run(builder, bound)
        held.append(sum(len(outcome.survey.skipped_list) for outcome in outcomes))
        return outcomes

    monkeypatch.setattr(Builder, "run", look)
    source = {"path": f"{tmp_path}/*.jsonl", "format": "jsonl"}
    for names in ("bd", "abcd"):
        for name in names:
            jsonl(tmp_path / f"{name}.jsonl", [f"{name} {number}" for number in range(9)])
            with (tmp_path / f"{name}.jsonl").open("a") as file:
                file.write("{\n[\n")
        report = prepare(config([source], bad_documents="skip", shard_bytes=100), workers=2)
        listed = [json.loads(line)["where"] for line in (tmp_path / "store/skipped.jsonl").read_text().splitlines()]
        assert listed == [f"{tmp_path}/{name}.jsonl:{line}" for name in names for line in (10, 11)]
        assert report.skipped == len(listed)
    assert set(held) == {0}


@pytest.mark.parametrize("dedup", [False, True])
def test_what_is_handed_over_is_prepared_like_a_file(
    tmp_path: Path, config: Configs, documents: Texts, jsonl: Callable[..., Path], dedup: bool
) -> None:
    texts = [*documents(48), "\ufeff línea\n\n", "漢字"]
    jsonl(tmp_path / "a.jsonl", texts)
    settings = {"dedup": {"documents": dedup}}
    prepare(config({"path": "a.jsonl", "name": "x"}, store=tmp_path / "file", **settings), workers=1)
    data = config({"path": "python:", "name": "x"}, **settings)
    report = prepare(data, workers=2, iterables={"x": lambda: iter(texts)})
    assert report.documents == 50 and not list((tmp_path / "store/.work").glob(".*"))
    assert prepare(data, iterables={"x": [{"text": text} for text in texts]}).up_to_date
    opened, file = TokenStore.open(tmp_path / "store"), TokenStore.open(tmp_path / "file")
    assert (
        opened.read("train", "x", 0, opened.tokens("train")) == file.read("train", "x", 0, file.tokens("train"))
    ).all()
    with pytest.raises(ConfigError, match="only once"):
        prepare(data, iterables={"x": iter(texts)})
    with pytest.raises(ConfigError, match="was not"):
        prepare(data)
