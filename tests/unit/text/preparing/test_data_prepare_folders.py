"""Mixed folders from files to a store: what the report says, and what the store holds and remembers."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.config.schema import DataConfig
from headway.core.errors import ConfigError, DataError
from headway.data.store import SKIPPED, TokenStore
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.text.preparing.prepare import prepare
from headway.text.reading import sources as source_module
from support.runs import store_contents

Configs = Callable[..., DataConfig]
Texts = Callable[..., list[str]]
Jsonl = Callable[..., Path]


def write_records(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")


def test_every_preparation_names_what_is_left_out(tmp_path: Path, config: Configs, documents: Texts) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.txt").write_text("\n".join(documents(20)))
    for name in ("b.pdf", "c.pdf", "d.docx"):
        (tmp_path / "corpus" / name).write_bytes(b"x")
    for up_to_date in (False, True):
        report = prepare(config(tmp_path / "corpus"), workers=1)
        assert (report.up_to_date, report.ignored_files) == (up_to_date, 3)
        assert report.left_out == {".pdf": 2, ".docx": 1}
        assert "left out: 2 .pdf, 1 .docx: convert them first" in report.describe()
    # What is excluded on purpose is not worth a word.
    report = prepare(config([{"path": str(tmp_path / "corpus"), "exclude": ["*.pdf", "*.docx"]}]), workers=1)
    assert report.up_to_date and "left out" not in report.describe()


def test_a_field_that_was_found_is_remembered_and_changes_nothing_else(
    tmp_path: Path, config: Configs, documents: Texts, jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "PIECE_BYTES", 500)
    texts = documents(60)
    (tmp_path / "corpus").mkdir()
    jsonl(tmp_path / "corpus/a.jsonl", texts[:30])
    write_records(tmp_path / "corpus/b.jsonl", [{"body": text} for text in texts[30:]])
    stores = []
    for workers in (1, 2):
        prepare(config(tmp_path / "corpus", store=tmp_path / f"store{workers}"), workers=workers)
        stores.append(store_contents(tmp_path / f"store{workers}"))
    assert stores[0] == stores[1]
    (described,) = TokenStore.open(tmp_path / "store1").inputs()["sources"]
    assert (described["field"], [file.get("field") for file in described["files"]]) == ("text", [None, "body"])
    # The same text under the usual name gives the same shards.
    jsonl(tmp_path / "corpus/b.jsonl", texts[30:])
    prepare(config(tmp_path / "corpus", store=tmp_path / "usual"), workers=1)
    ids = [
        np.concatenate([store.read(split, "corpus", 0, store.tokens(split)) for split in ("train", "validation")])
        for store in (TokenStore.open(tmp_path / name) for name in ("store1", "usual"))
    ]
    assert np.array_equal(*ids)


def test_a_delimiter_is_part_of_how_a_file_is_read(tmp_path: Path, config: Configs, documents: Texts) -> None:
    rows = "".join(f"{text!r};{number},text\n" for number, text in enumerate(documents(20)))
    (tmp_path / "a.csv").write_text(f"text;n,text\n{rows}")
    sizes = []
    for delimiter in (";", ","):
        report = prepare(config([{"path": "a.csv", "delimiter": delimiter}], bad_documents="skip"), workers=1)
        sizes.append(report.text_bytes)
        assert not report.up_to_date
    assert sizes[0] > sizes[1]


def test_both_of_two_bad_records_are_listed(tmp_path: Path, config: Configs, documents: Texts, jsonl: Jsonl) -> None:
    jsonl(tmp_path / "a.jsonl", documents(20))
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    lines[3], lines[9] = '{"text": null}', "nonsense"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"holds null, not text; also a.jsonl:10: not valid JSON") as caught:
        prepare(config("a.jsonl"), workers=1)
    assert caught.value.where == "a.jsonl:4"
    lines[10:17] = ["{}"] * 7
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"a.jsonl:13: no field 'text'.*; and 4 more in this part of the file"):
        prepare(config("a.jsonl"), workers=1)
    prepare(config("a.jsonl", bad_documents="skip"), workers=1)
    listed = [json.loads(line)["where"] for line in (tmp_path / "store" / SKIPPED).read_text().splitlines()]
    assert listed == [f"a.jsonl:{number}" for number in (4, *range(10, 18))]


def test_an_archive_ends_a_preparation_with_the_command_or_is_skipped(
    tmp_path: Path, config: Configs, documents: Texts
) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.txt").write_text("\n".join(documents(20)))
    with zipfile.ZipFile(tmp_path / "corpus/b.txt", "w") as archive:
        archive.writestr("c.txt", "hello")
    with pytest.raises(DataError, match="a ZIP archive, not text") as caught:
        prepare(config("corpus"), workers=1)
    assert caught.value.where == "corpus/b.txt" and "unzip -d b corpus/b.txt" in str(caught.value.fix)
    assert prepare(config("corpus", bad_documents="skip"), workers=1).skipped == 1


# Prompts with completions


def prompts(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f'Question "{number}": what follows\n', "completion": f" {number + 1} é\n"}
        for number in range(count)
    ]


def trained_texts(store: TokenStore) -> list[tuple[str, str]]:
    """The text of each document that is read, and of the part of it that is trained, the end of text left out."""
    tokenizer = Tokenizer.load(store.tokenizer_folder)
    found = []
    for source in store.sources("train"):
        for start, end in pairwise(store.documents("train", source).astype(int).tolist()):
            ids = store.read("train", source, start, end - start)
            mask = store.read_mask("train", source, start, end - start)
            assert mask is not None and mask[-1] and ids[-1] == store.end_of_text_id
            assert not (mask[:-1] & ~mask[1:]).any()  # once begun, all is trained
            found.append((tokenizer.decode(ids[:-1][~mask[:-1]]), tokenizer.decode(ids[:-1][mask[:-1]])))
    return found


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_only_the_completion_is_trained(tmp_path: Path, config: Configs, name: str) -> None:
    records = prompts(40)
    if name == "a.jsonl":
        write_records(tmp_path / name, records)
    elif name == "a.json":
        (tmp_path / name).write_text(json.dumps(records))
    elif name == "a.csv":
        rows = ('"{}","{}"\n'.format(r["prompt"].replace('"', '""'), r["completion"]) for r in records)
        (tmp_path / name).write_text("prompt,completion\n" + "".join(rows))
    else:
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(records), tmp_path / name)
    data = config([{"path": name, "format": "completion"}], validation=0)
    report = prepare(data, workers=1)
    store = TokenStore.open(data.store)
    assert trained_texts(store) == [(record["prompt"], record["completion"]) for record in records]
    assert report.trained_tokens is not None and 40 < report.trained_tokens < store.tokens("train")
    # The vocabulary is of the texts, not of the form in which they are handed on.
    vocabulary = json.loads((store.tokenizer_folder / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    assert "Question" in vocabulary and not any("prompt" in token or '":"' in token for token in vocabulary)


def test_stores_of_completions_do_not_depend_on_workers(
    tmp_path: Path, config: Configs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "PIECE_BYTES", 500)
    write_records(tmp_path / "a.jsonl", prompts(100))
    stores = []
    for workers in (1, 2):
        data = config([{"path": "a.jsonl", "format": "completion"}], store=tmp_path / f"store{workers}", validation=0.2)
        prepare(data, workers=workers)
        stores.append(store_contents(data.store))
    assert stores[0] == stores[1]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": "x", "completion": ""}, "nothing of the record would be trained"),
        ({"prompt": "x", "completion": 3}, "holds int, not text"),
        ({"prompt": [{"role": "user", "content": "x"}], "completion": "y"}, "which format: chat reads"),
        ({"prompt": "x", "completion": "\ud800"}, "not valid UTF-8"),
        ({"prompt": "x"}, "no field 'completion'; there are: prompt"),
    ],
)
def test_a_record_that_has_no_completion_is_malformed(
    tmp_path: Path, config: Configs, record: dict[str, Any], reason: str
) -> None:
    write_records(tmp_path / "a.jsonl", [*prompts(20), record])
    with pytest.raises(DataError, match=reason) as caught:
        prepare(config([{"path": "a.jsonl", "format": "completion"}]), workers=1)
    assert caught.value.where == "a.jsonl:21"


@pytest.mark.parametrize(
    ("source", "values"),
    [
        ({"field": "text2"}, {}),
        ({"template": "{prompt}"}, {}),
        ({"clean": ["length"]}, {}),
        ({}, {"clean": ["length"]}),
        ({}, {"dedup": {"paragraphs": True}}),
        ({"delimiter": ";", "format": "chat"}, {}),
    ],
)
def test_settings_that_completions_do_not_have_are_refused(
    config: Configs, source: dict[str, Any], values: dict[str, Any]
) -> None:
    with pytest.raises((ValueError, ConfigError)):
        config([{"path": "a.jsonl", "format": "completion", **source}], **values)
