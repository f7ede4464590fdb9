"""Which files a config means, under which names."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.config.sections.data import SourceConfig
from headway.core.errors import ConfigError, DataError
from headway.text.reading.places import stamp_of
from headway.text.reading.readers import read_batches
from headway.text.reading.sources import PIECE_BYTES, Source, find_sources, longest_piece, pieces_of
from support.runs import refuse_to_open
from support.sources import find, read


def names(source: Source) -> list[str]:
    return [file.name for file in source.files]


def test_folder_is_sorted_without_hidden_and_unknown_files(tmp_path: Path) -> None:
    for name in (
        "b.txt",
        "a/z.txt",
        "a/.hidden.txt",
        ".git/x.txt",
        "picture.png",
        "c.jsonl.gz",
        "d.csv.zst",
        "e.md",
        "f.txt.bz2",
        "g.arrow.gz",
    ):
        file = tmp_path / "corpus" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    (source,) = find(tmp_path / "corpus")
    assert names(source) == ["a/z.txt", "b.txt", "c.jsonl.gz", "d.csv.zst", "e.md", "f.txt.bz2"]
    # Tables compress what they hold by themselves, so nobody knows what a compressed one is.
    assert source.ignored == 2
    assert [file.compression for file in source.files] == [None, None, "gzip", "zstd", None, "bz2"]
    # An explicit format takes every file that is not hidden.
    (source,) = find(tmp_path / "corpus", format="text")
    assert "picture.png" in names(source) and source.ignored == 0


def test_globs_and_files_that_two_sources_mean(tmp_path: Path) -> None:
    for name in ("one/a.txt", "one/b.txt", "two/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    first, second = find(tmp_path / "*/[ab].txt", tmp_path / "**" / "*.txt")
    assert names(first) == ["one/a.txt", "one/b.txt"]
    assert names(second) == ["two/c.txt"]
    (tmp_path / "odd[1].txt").write_text("a name that looks like a glob")
    assert read(tmp_path / "odd[1].txt").texts == ["a name that looks like a glob"]


def test_two_sources_read_other_texts_of_one_file(tmp_path: Path, jsonl: Callable[..., Path]) -> None:
    path = str(jsonl(tmp_path / "a.jsonl", ["x"], title="y"))
    configs = [
        SourceConfig(path=path),
        SourceConfig(path=path, field="title", name="titles", limit="1 documents"),
        SourceConfig(path=path, template="{title}: {text}", name="both"),
        SourceConfig(path=path, format="text", name="plain"),
        SourceConfig(path=path, format="text", field="title", name="plain again"),
        SourceConfig(path=path, name="again"),
    ]
    sources = find_sources(configs)
    assert [names(source) for source in sources] == [["a.jsonl"]] * 4 + [[], []]
    texts = [text for piece in pieces_of(sources) for batch in read_batches(piece) for text in batch.texts]
    assert texts == ["x", "y", "y: x", (tmp_path / "a.jsonl").read_text()]


def test_what_is_behind_a_limit_is_no_other_sources(tmp_path: Path, jsonl: Callable[..., Path]) -> None:
    jsonl(tmp_path / "a.jsonl", ["x", "y"])
    first = SourceConfig(path=str(tmp_path / "a.jsonl"), limit="1 documents")
    with pytest.raises(ConfigError, match="sources 'a' and 'all' read the same file") as caught:
        find_sources([first, SourceConfig(path=str(tmp_path), name="all")])
    assert "a.jsonl" in str(caught.value.where)
    # Of one behind an earlier source without a limit, nothing is lost.
    assert [names(source) for source in find_sources([SourceConfig(path=str(tmp_path)), first])] == [["a.jsonl"], []]


def test_source_names_are_folders_and_unique(tmp_path: Path) -> None:
    for name in ("x/part.txt", "y/part.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    assert [s.name for s in find(tmp_path / "x/part.txt", tmp_path / "y/part.txt")] == ["part", "part-2"]
    assert find(tmp_path / "x", name="../my corpus")[0].name == "my-corpus"
    assert find(str(tmp_path / "x" / "*.txt"))[0].name == "x"


def test_standard_library_is_there_without_third_party_code() -> None:
    (source,) = find("stdlib:")
    assert source.name == "stdlib" and len(source.files) > 400
    assert "argparse.py" in names(source) and "json/decoder.py" in names(source)
    assert not any(part in name.split("/") for name in names(source) for part in ("site-packages", "dist-packages"))
    assert sum(file.bytes for file in source.files) > 5_000_000


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("nowhere.txt", "no such file"),
        ("corpus/*.jsonl", "glob matches no files"),
        ("empty", "holds no files"),
        ("corpus", "none of the 1 files has a known ending"),
        ("corpus/a.xml", "no known format"),
    ],
)
def test_nothing_to_read_is_an_error(tmp_path: Path, path: str, what: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.xml").write_text("x")
    with pytest.raises(DataError, match=what) as caught:
        find(tmp_path / path)
    assert caught.value.where == str(tmp_path / path)


def test_a_file_url_is_a_local_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("here")
    (source,) = find(f"file://{tmp_path}/a.txt")
    assert source.files[0].local and source.files[0].version is None
    assert read(f"file://{tmp_path}/*.txt").texts == ["here"]
    assert read(f"hf://{tmp_path}").texts == ["here"]  # a folder of files where a dataset's name could be


@pytest.mark.parametrize(("name", "longest"), [("a.jsonl", PIECE_BYTES), ("a.jsonl.gz", None), ("a.txt", None)])
def test_the_longest_piece_is_what_no_second_worker_can_share(tmp_path: Path, name: str, longest: int | None) -> None:
    size = 2 * PIECE_BYTES + 1
    with (tmp_path / name).open("wb") as file:
        file.truncate(size)
    (tmp_path / "b.txt").write_text("short")
    assert longest_piece(find_sources([SourceConfig(path=str(tmp_path))])) == (longest or size)


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("secret")

    def denied(path: Path) -> OSError | None:
        return PermissionError(13, "Permission denied") if path.name == "a.txt" else None

    with monkeypatch.context() as patch, pytest.raises(DataError, match="Permission denied") as caught:
        refuse_to_open(patch, denied)  # root may read anything, so permissions alone prove nothing here
        find(tmp_path / "a.txt")
    assert caught.value.where == str(tmp_path / "a.txt")


def test_a_folder_means_what_its_links_lead_to(tmp_path: Path) -> None:
    for name in ("corpus/a.txt", "elsewhere/deep/b.txt"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "corpus/linked").symlink_to("../elsewhere")
    # Links that lead in a circle end, and a file by two names is one.
    (tmp_path / "elsewhere/back").symlink_to("../corpus")
    (tmp_path / "corpus/again").symlink_to("linked/deep")
    (source,) = find(tmp_path / "corpus")
    assert names(source) == ["a.txt", "again/b.txt"]


def test_globs_do_not_follow_links_round_in_circles(tmp_path: Path) -> None:
    for name in ("a", "b", ".hidden"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text(name)
        for number in range(3):
            (tmp_path / name / f"up{number}").symlink_to("..")
    assert [file.name for file in find(tmp_path / "**/*.txt")[0].files] == ["a/text.txt", "b/text.txt"]


@pytest.mark.parametrize("path", ["corpus", "corpus/*.txt"])
def test_a_link_to_a_file_that_is_gone_is_not_passed_over(tmp_path: Path, path: str) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.txt").write_text("here")
    (tmp_path / "corpus/b.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.raises(DataError, match="No such file") as caught:
        find(tmp_path / path)
    assert caught.value.where == str(tmp_path / "corpus/b.txt")


@pytest.mark.parametrize("path", ["corpus", "corpus/*", "corpus/b.txt"])
def test_a_link_that_leads_in_a_circle_is_named(tmp_path: Path, path: str) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.txt").write_text("here")
    (tmp_path / "corpus/b.txt").symlink_to("c.txt")
    (tmp_path / "corpus/c.txt").symlink_to("b.txt")
    with pytest.raises(DataError, match=r"symbolic links \(a link to c.txt\)") as caught:
        find(tmp_path / path)
    assert caught.value.where == str(tmp_path / "corpus/b.txt")


@pytest.mark.parametrize("path", ["corpus", "corpus/*"])
def test_a_link_that_would_be_ignored_may_lead_anywhere(tmp_path: Path, path: str) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.txt").write_text("here")
    (tmp_path / "corpus/b.lock").symlink_to("nowhere")
    (tmp_path / "corpus/c").symlink_to("d")
    (tmp_path / "corpus/d").symlink_to("c")
    (source,) = find(tmp_path / path)
    assert names(source) == ["a.txt"] and source.ignored == 3


def test_compressed_json_is_read_by_lines_as_c4_and_dolma_name_their_shards(tmp_path: Path) -> None:
    for name in ("c4-train.00000-of-01024.json.gz", "v1_5r2.json.gz"):
        (tmp_path / name).write_bytes(gzip.compress(b'{"text": "here"}\n{"text": "there"}\n'))
    (tmp_path / "dataset_info.json").write_text("{}")
    assert read(tmp_path).texts == ["here", "there"] * 2
    (tmp_path / "array.json.gz").write_bytes(gzip.compress(b'[{"text": "here"},\n {"text": "there"}]'))
    assert read(tmp_path / "array.json.gz").texts == ["here", "there"]
    (tmp_path / "array.jsonl").write_text('[{"text": "here"}]')
    (bad,) = read(tmp_path / "array.jsonl").bad
    assert "an array is read from a file named .json" in bad.reason


def test_a_folder_that_cannot_be_listed_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus/closed").mkdir(parents=True)
    (tmp_path / "corpus/a.txt").write_text("here")
    listed = os.scandir

    def denied(folder: Path) -> object:
        if folder.name == "closed":
            raise PermissionError(13, "Permission denied")
        return listed(folder)

    monkeypatch.setattr(os, "scandir", denied)  # root may read anything, so permissions alone prove nothing here
    with pytest.raises(DataError, match="Permission denied") as caught:
        find(tmp_path / "corpus")
    assert caught.value.where == str(tmp_path / "corpus/closed")


def test_a_stamp_changes_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (file,) = find(tmp_path / "a.txt")[0].files
    before = stamp_of(file)
    assert stamp_of(file) == before
    (tmp_path / "a.txt").write_text("four")
    assert stamp_of(file) != before
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match="No such file"):
        stamp_of(file)
