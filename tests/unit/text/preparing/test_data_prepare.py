"""From files to a store: bytes, splits, bad input, and what an error leaves behind."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.config import load_config
from headway.config.schema import DataConfig
from headway.core.errors import DataError
from headway.data.store import SKIPPED, TokenStore
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.text.preparing.prepare import prepare
from headway.text.preparing.workers import Pipeline
from headway.text.reading import sources as source_module
from support.runs import store_contents

Configs = Callable[..., DataConfig]
Texts = Callable[..., list[str]]
Jsonl = Callable[..., Path]


def decoded(store: TokenStore, split: str) -> list[str]:
    """All documents of a split as text."""
    tokenizer = Tokenizer.load(store.tokenizer_folder)
    texts = []
    for source in store.sources(split):
        bounds = store.documents(split, source).astype(int).tolist()
        for start, end in pairwise(bounds):
            ids = store.read(split, source, start, end - start)
            assert ids[-1] == store.end_of_text_id and store.end_of_text_id not in ids[:-1]
            texts.append(tokenizer.decode(ids[:-1]))
    return texts


def document_hash(utf8: bytes) -> int:
    return int.from_bytes(hashlib.sha256(utf8).digest()[:8], "big")


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_documents_go_in_and_come_out(
    tmp_path: Path, config: Configs, documents: Texts, jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "PIECE_BYTES", 500)
    texts = [*documents(80), "<|endoftext|> spelled out", "Ünïcödé 🎉"]
    jsonl(tmp_path / "a.jsonl", texts[:50])
    jsonl(tmp_path / "b.jsonl", texts[50:])
    report = prepare(config(["a.jsonl", "b.jsonl"], validation=0.25, shard_bytes=1500), workers=1)
    store = TokenStore.open(tmp_path / "store")
    held_out = [text for text in texts if document_hash(text.encode()) < 0.25 * 2**64]
    assert 5 < len(held_out) < 40
    assert decoded(store, "validation") == held_out
    assert decoded(store, "train") == [text for text in texts if text not in held_out]
    assert (report.documents, report.validation_documents, report.skipped) == (82, len(held_out), 0)
    assert report.text_bytes == sum(len(text.encode()) for text in texts)
    assert report.tokens == store.tokens("train") + store.tokens("validation")
    assert report.fingerprint == store.fingerprint
    shards = store.shards("train", "a")
    assert len(shards) > 2 and sum(shard.tokens for shard in shards) == store.tokens("train", "a")
    assert [shard.first_token for shard in shards[:2]] == [0, shards[0].tokens]
    assert (tmp_path / "store/train/a" / shards[0].file).stat().st_size == 2 * shards[0].tokens
    assert leftovers(tmp_path) == []


def test_bytes_do_not_depend_on_workers(
    tmp_path: Path, config: Configs, documents: Texts, jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "PIECE_BYTES", 2000)
    jsonl(tmp_path / "a.jsonl", documents(100))
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("broken\n" * 3)
    for number, text in enumerate(documents(20, seed=3)):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    results = []
    for workers in (1, 2, 4):
        data = config(["a.jsonl", "texts"], store=tmp_path / f"store{workers}", bad_documents="skip", shard_bytes=5000)
        report = prepare(data, workers=workers)
        assert report.workers == workers
        results.append(store_contents(data.store))
    assert results[0] == results[1] == results[2]
    assert len(results[0]) > 8


def test_store_is_the_same_wherever_the_text_lies(tmp_path: Path, config: Configs, documents: Texts) -> None:
    prints = []
    for place in ("here", "there/and/deeper"):
        folder = tmp_path / place / "corpus"
        folder.mkdir(parents=True)
        for number, text in enumerate(documents(10)):
            (folder / f"{number}.txt").write_text(text)
        prints.append(prepare(config(folder, store=tmp_path / place / "store"), workers=1).fingerprint)
    assert prints[0] == prints[1]


def test_wide_vocabularies_are_uint32(tmp_path: Path, config: Configs) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    vocabulary = {f"w{number}": number for number in range(70_000)}
    backend = Backend(models.WordLevel({**vocabulary, "</s>": 70_000}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (tmp_path / "tokenizer.json").write_text(backend.to_str())
    (tmp_path / "a.txt").write_text("w69999 w1")
    prepare(config("a.txt", tokenizer={"path": tmp_path / "tokenizer.json", "encoder": "tokenizers"}), workers=1)
    store = TokenStore.open(tmp_path / "store")
    assert store.manifest["dtype"] == "uint32"
    assert store.read("train", "a", 0, 3).tolist() == [69_999, 1, 70_000]
    assert (
        next((tmp_path / "store/train/a").glob("*.bin")).read_bytes() == np.array([69_999, 1, 70_000], "<u4").tobytes()
    )


@pytest.mark.parametrize(("count", "share"), [(2, 0.05), (2, 0.99), (5, 0.0001), (30, 0.9999)])
def test_each_side_has_a_document_when_there_are_two(
    tmp_path: Path, config: Configs, documents: Texts, jsonl: Jsonl, count: int, share: float
) -> None:
    texts = documents(count)
    jsonl(tmp_path / "a.jsonl", texts)
    prepare(config("a.jsonl", validation=share), workers=1)
    store = TokenStore.open(tmp_path / "store")
    assert sorted(decoded(store, "train") + decoded(store, "validation")) == sorted(texts)
    assert store.splits == ["train", "validation"]
    # What the first pass wrote is gone: no file but those of the manifest.
    assert store.verify() == []
    assert len(list((tmp_path / "store").rglob("*.bin"))) == sum(
        len(part["shards"]) for split in store.manifest["splits"].values() for part in split.values()
    )


@pytest.mark.parametrize("texts", [["only one"], ["equal", "equal", "equal"]])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.999])
def test_what_cannot_be_split_is_for_training(
    tmp_path: Path, config: Configs, jsonl: Jsonl, texts: list[str], share: float
) -> None:
    jsonl(tmp_path / "a.jsonl", texts)
    prepare(config("a.jsonl", validation=share), workers=1)
    store = TokenStore.open(tmp_path / "store")
    assert store.splits == ["train"] and decoded(store, "train") == texts


def test_equal_documents_are_never_on_both_sides(
    tmp_path: Path, config: Configs, documents: Texts, jsonl: Jsonl
) -> None:
    jsonl(tmp_path / "a.jsonl", documents(50))
    jsonl(tmp_path / "b.jsonl", documents(50)[::-1])
    prepare(config(["a.jsonl", "b.jsonl"], validation=0.4), workers=1)
    store = TokenStore.open(tmp_path / "store")
    train, validation = set(decoded(store, "train")), set(decoded(store, "validation"))
    assert train and validation and not train & validation


def test_unchanged_is_up_to_date_and_changes_are_seen(
    tmp_path: Path, config: Configs, documents: Texts, jsonl: Jsonl
) -> None:
    jsonl(tmp_path / "a.jsonl", documents(20))
    first = prepare(config("a.jsonl"), workers=1)
    before = (tmp_path / "store").stat().st_ino
    again = prepare(config("a.jsonl"), workers=1)
    assert again.up_to_date and again.fingerprint == first.fingerprint and again.tokens == first.tokens
    assert (tmp_path / "store").stat().st_ino == before and leftovers(tmp_path) == []
    assert not prepare(config("a.jsonl"), workers=1, force=True).up_to_date
    for change in ({"validation": 0.3}, {"tokenizer": {"vocab_size": 280}}):
        assert not prepare(config("a.jsonl", **change), workers=1).up_to_date
        assert prepare(config("a.jsonl", **change), workers=1).up_to_date
    saved = tmp_path / "store/tokenizer/tokenizer.json"
    (tmp_path / "given.json").write_bytes(saved.read_bytes())
    given = {"tokenizer": {"path": tmp_path / "given.json"}}
    assert not prepare(config("a.jsonl", **given), workers=1).up_to_date
    assert prepare(config("a.jsonl", **given), workers=1).up_to_date
    # The same length, one letter changed, time of change put back.
    stat = (tmp_path / "a.jsonl").stat()
    text = (tmp_path / "a.jsonl").read_text()
    (tmp_path / "a.jsonl").write_text(text.replace("document", "Document", 1))
    os.utime(tmp_path / "a.jsonl", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert not prepare(config("a.jsonl", **given), workers=1).up_to_date
    next((tmp_path / "store").rglob("*.bin")).unlink()
    assert not prepare(config("a.jsonl", **given), workers=1).up_to_date


def test_bad_documents_fail_with_the_first_in_input_order(
    tmp_path: Path, config: Configs, documents: Texts, jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    jsonl(tmp_path / "a.jsonl", documents(200))
    prepare(config("a.jsonl"), workers=1)
    before = store_contents(tmp_path / "store")
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    lines[6] = lines[150] = '{"text": "broken'
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(source_module, "PIECE_BYTES", 1500)
    for workers in (1, 2):
        with pytest.raises(DataError, match="not valid JSON") as caught:
            prepare(config("a.jsonl"), workers=workers)
        assert caught.value.where == "a.jsonl:7" and "bad_documents: skip" in str(caught.value.fix)
    assert store_contents(tmp_path / "store") == before
    assert leftovers(tmp_path) == []


def test_skipped_documents_are_counted_and_listed(
    tmp_path: Path, config: Configs, documents: Texts, jsonl: Jsonl, capsys: pytest.CaptureFixture[str]
) -> None:
    jsonl(tmp_path / "a.jsonl", documents(20))
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"text": ""}\n{"txt": 1}\n' + "nonsense\n" * 1500)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(os.urandom(1000) + b"x" * 1000)[:-20])
    (tmp_path / "empty.txt").write_bytes(b"")
    report = prepare(config(["a.jsonl", "b.txt.gz", "empty.txt"], bad_documents="skip"), workers=1)
    assert (report.documents, report.skipped, report.empty_documents, report.empty_files) == (20, 1502, 1, 1)
    said = capsys.readouterr().err
    assert "an input file is empty: empty.txt" in said
    assert "an input file is left out from a place on, named in skipped.jsonl" in said
    first, second, _ = TokenStore.open(tmp_path / "store").manifest["sources"]
    assert (first["skipped"], second["skipped"], first["empty"]) == (1501, 1, 1)
    listed = [json.loads(line) for line in (tmp_path / "store" / SKIPPED).read_text().splitlines()]
    assert len(listed) == 1000
    assert listed[0]["where"] == "a.jsonl:22" and "did you mean" not in listed[5]["reason"]
    assert "1,502 malformed documents skipped" in report.describe()
    alone = replace(report, documents=1, validation_documents=0, tokens=1, skipped=1, up_to_date=True)
    assert ": 1 document (0 for validation) · 1 token · " in alone.describe()
    assert "1 malformed document skipped, listed in" in alone.describe()


@pytest.mark.parametrize("preset", ["quickstart", "laptop"])
def test_presets_take_the_standard_library_with_its_malformed_files(
    tmp_path: Path, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "library").mkdir()
    for number in range(20):
        (tmp_path / "library" / f"{number}.py").write_text(f"def f{number}(): return {number}\n")
    (tmp_path / "library" / "test_bad.py").write_bytes(b"# -*- coding: latin-1 -*-\n# caf\xe9\n")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path / "library")})
    config = load_config(preset, [f"data.store={tmp_path / 'store'}", "data.tokenizer.vocab_size=300"])
    report = prepare(config.data)
    assert (report.documents, report.skipped) == (20, 1)


def test_no_text_at_all_is_an_error(tmp_path: Path, config: Configs) -> None:
    (tmp_path / "a.txt").write_bytes(b"")
    with pytest.raises(DataError, match="holds no text"):
        prepare(config("a.txt"), workers=1)
    (tmp_path / "a.jsonl").write_text('{"text": null}\n{"text": 1}\n')
    with pytest.raises(DataError, match="all 2 documents are malformed") as caught:
        prepare(config("a.jsonl", bad_documents="skip"), workers=1)
    assert "field 'text' holds null" in caught.value.what
    assert not (tmp_path / "store").exists()


def test_something_else_in_the_stores_place_is_not_deleted(tmp_path: Path, config: Configs) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.tex").write_text("years of work")
    for force in (False, True):
        with pytest.raises(DataError, match="not a token store"):
            prepare(config("a.txt"), workers=1, force=force)
    assert (tmp_path / "store" / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("path", ["corpus", "corpus/**/*.jsonl"])
def test_a_store_among_its_sources_is_no_text(tmp_path: Path, config: Configs, path: str) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.jsonl").write_text('{"text": "some words"}\n{"text": "other words"}\n{broken\n')
    data = config(path, store=tmp_path / "corpus" / "store", bad_documents="skip")
    assert prepare(data, workers=1).skipped == 1 and (data.store / SKIPPED).exists()
    assert prepare(data, workers=1).up_to_date


@pytest.mark.skipif(sys.platform == "darwin", reason="file names are UTF-8 there")
def test_file_names_that_are_no_utf8(tmp_path: Path, config: Configs) -> None:
    (tmp_path / "corpus").mkdir()
    for name, content in ((b"caf\xe9", b"old text " * 9), (b"bad\xff", b"\xff"), (b"plain", b"new text " * 9)):
        (tmp_path / "corpus" / os.fsdecode(name + b".txt")).write_bytes(content)
    data = config("corpus", bad_documents="skip", clean=["unicode"], dedup={"near": True})
    assert prepare(data, workers=1).documents == 2 and prepare(data, workers=1).up_to_date
    files = TokenStore.open(data.store).inputs()["sources"][0]["files"]
    assert [file["path"] for file in files] == ["bad\\xff.txt", "caf\\xe9.txt", "plain.txt"]
    (skipped,) = (data.store / SKIPPED).read_text("utf-8").splitlines()
    assert Path(json.loads(skipped)["where"]).exists()


def test_the_working_directory_is_no_store(tmp_path: Path, config: Configs, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(DataError, match="a folder of its own"):
        prepare(config("../a.txt", store="."), workers=1)


def test_a_linked_store_is_replaced_where_it_lies(tmp_path: Path, config: Configs) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "disk").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "disk" / "store")
    prepare(config("a.txt"), workers=1)
    assert (tmp_path / "store").is_symlink() and (tmp_path / "disk/store/manifest.json").exists()


def test_a_file_that_changes_meanwhile_is_noticed(
    tmp_path: Path, config: Configs, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headway.text.preparing.encode import PieceWorker

    (tmp_path / "a.txt").write_text("some text")
    process = PieceWorker.process

    def process_and_append(*arguments: Any) -> Any:
        result = process(*arguments)
        (tmp_path / "a.txt").write_text("some text and more")
        return result

    monkeypatch.setattr(PieceWorker, "process", process_and_append)
    with pytest.raises(DataError, match="changed while it was read"):
        prepare(config("a.txt"), workers=1)
    assert not (tmp_path / "store").exists()


def test_one_preparation_at_a_time(tmp_path: Path, config: Configs) -> None:
    from headway.text.preparing.building import building

    (tmp_path / "a.txt").write_text("some text")
    with building(tmp_path / "store") as folder:
        (folder / "half done").write_text("x")
        with pytest.raises(DataError, match="another process"):
            prepare(config("a.txt"), workers=1)
        assert (folder / "half done").exists()
    prepare(config("a.txt"), workers=1)


# Not ru_maxrss, which a process inherits from the one that starts it.
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("megabytes", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_a_very_long_line_works_in_bounded_memory(tmp_path: Path, megabytes: int) -> None:
    with (tmp_path / "a.jsonl").open("w") as file:
        file.write('{"text": "short"}\n{"text": "')
        for number in range(10 * megabytes):
            file.write(f"{number} " + "words and words " * 6250)
        file.write('"}\n{"text": "last"}\n')
    (tmp_path / "tokenizer.json").write_bytes(_fast_tokenizer())
    script = (
        "import re; from pathlib import Path; from headway.config.schema import DataConfig;"
        "from headway.text.preparing.prepare import prepare;"
        "r = prepare(DataConfig.model_validate({'sources': 'a.jsonl', 'store': 'store', 'validation': 0,"
        " 'max_document_bytes': '2 GB',"
        " 'tokenizer': {'path': 'tokenizer.json'}}), workers=1);"
        "print(r.documents, re.search(r'VmHWM:\\s+(\\d+) kB', Path('/proc/self/status').read_text())[1])"
    )
    result = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, check=True, cwd=tmp_path)
    documents, peak_kib = map(int, result.stdout.split())
    assert documents == 3
    # Some 250 MB are the libraries and one part's encodings.
    assert peak_kib * 1024 / 1e6 < 300 + 7 * megabytes


def _fast_tokenizer() -> bytes:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({token: number for number, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    return str(backend.to_str()).encode()


def test_a_worker_that_dies_is_reported(
    tmp_path: Path, config: Configs, documents: Texts, jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "PIECE_BYTES", 1000)
    jsonl(tmp_path / "a.jsonl", documents(50))
    monkeypatch.setenv("HEADWAY_FAULTS", "kill@data.encode:3")
    with pytest.raises(DataError, match="a worker process died"):
        # The reference encoder works in Python, and so in processes.
        prepare(config("a.jsonl", tokenizer={"vocab_size": 300, "encoder": "tokenizers"}), workers=2)


def test_a_worker_that_died_while_nothing_was_asked_of_it_is_reported() -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        with pytest.raises(BrokenProcessPool):
            pool.submit(os._exit, 1).result()
        with pytest.raises(DataError, match="a worker process died"):
            Pipeline(1, pool).submit(None, lambda result: None)  # type: ignore[arg-type]


def test_importing_the_package_is_light() -> None:
    script = "import sys, headway.data; print([m for m in ('torch', 'tokenizers', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, check=True).stdout == "[]\n"
    script = "import sys, headway.text.preparing.prepare; print('torch' in sys.modules, 'pyarrow' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, check=True)
    assert result.stdout == "False False\n"
