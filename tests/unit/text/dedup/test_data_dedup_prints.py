"""Prints of documents: what is in them, and their files."""

from __future__ import annotations

import hashlib
import pickle
import resource
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from headway.core.errors import DataError
from headway.text.dedup import (
    DocumentPrints,
    StoredPrints,
    find_duplicates,
    fingerprint_documents,
    join_prints,
    prints_recipe,
)
from support.dedup import prose, settings

ALL = settings(documents=True, paragraphs=True, near=True)
TEXTS = ["A first text.\n\n" + "A paragraph that is long enough to count. " * 3, "naïve – 日本語", *prose(100, 5)]


def same(one: DocumentPrints, other: DocumentPrints) -> bool:
    return all(np.array_equal(getattr(one, field.name), getattr(other, field.name)) for field in fields(DocumentPrints))


def test_hashes_are_the_first_half_of_sha256_and_sizes_are_bytes() -> None:
    prints = fingerprint_documents(TEXTS, settings(documents=True))
    for number, text in enumerate(TEXTS):
        digest = hashlib.sha256(text.encode()).digest()
        assert int(prints.hashes[number, 0]).to_bytes(8, "big") == digest[:8]
        assert int(prints.hashes[number, 1]).to_bytes(8, "big") == digest[8:16]
        assert prints.sizes[number] == len(text.encode())


def test_only_what_is_wanted_is_made() -> None:
    prints = fingerprint_documents(TEXTS, settings(documents=True))
    assert prints.signatures.shape == (7, 0) and prints.bands.shape == (0, 7)
    assert prints.paragraph_hashes.shape == (0,) and prints.paragraph_counts.tolist() == [0] * 7
    prints = fingerprint_documents(TEXTS, ALL)
    assert prints.signatures.shape[0] == 7 and prints.bands.shape == (20, 7)
    assert prints.paragraph_counts.tolist() == [2, 1, 1, 1, 1, 1, 1] and len(prints.paragraph_hashes) == 8
    assert [bool(value) for value in prints.paragraph_hashes[:3]] == [False, True, False]


@pytest.mark.parametrize("texts", [TEXTS, [], ["x"]])
def test_a_file_gives_back_what_was_saved(texts: list[str], tmp_path: Path) -> None:
    prints = fingerprint_documents(texts, ALL)
    prints.save(tmp_path / "folder" / "unit.prints")
    stored = StoredPrints(tmp_path / "folder" / "unit.prints")
    assert len(stored) == len(prints) == len(texts)
    for field in fields(DocumentPrints):
        value, wanted = getattr(stored, field.name), getattr(prints, field.name)
        assert np.array_equal(value, wanted) and value.dtype == wanted.dtype
    again = pickle.loads(pickle.dumps(stored))  # noqa: S301
    assert np.array_equal(again.signatures, prints.signatures)


def test_stored_prints_are_mapped_and_hold_no_file_open(tmp_path: Path) -> None:
    prints = fingerprint_documents(TEXTS, ALL)
    prints.save(tmp_path / "unit.prints")
    assert isinstance(StoredPrints(tmp_path / "unit.prints").signatures, np.memmap)
    before = sum(1 for _ in Path("/dev/fd").iterdir())
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 200, limit[1]))
    try:
        many = [StoredPrints(tmp_path / "unit.prints") for _ in range(400)]
        found = find_duplicates(many, ["source"] * 400, ALL)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert found.report["total"]["removed"] == 399 * 7


def _cut(data: bytes) -> bytes:
    return data[:-1]


@pytest.mark.parametrize(
    "damage",
    [
        _cut,
        lambda data: data + b"x",
        lambda data: b"",
        lambda data: data[:100],
        lambda data: data.replace(b"headway-prints-1", b"headway-prints-2"),
        lambda data: data.replace(b"'<u8'", b"'|O8'", 1),
        lambda data: data.replace(b"'<i8'", b"'<f8'", 1),
        lambda data: data.replace(b"(7, 2)", b"(8, 2)"),
    ],
)
def test_damaged_files_are_refused_by_name(damage: object, tmp_path: Path) -> None:
    file = tmp_path / "unit.prints"
    fingerprint_documents(TEXTS, ALL).save(file)
    file.write_bytes(damage(file.read_bytes()))  # type: ignore[operator]
    with pytest.raises(DataError, match=r"unit\.prints"):
        StoredPrints(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        StoredPrints(tmp_path / "nowhere")


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "unit.prints"
    fingerprint_documents(TEXTS, ALL).save(file)
    old = file.read_bytes()
    monkeypatch.setenv("HEADWAY_FAULTS", "enospc@dedup.prints")
    with pytest.raises(OSError, match="ordered"):
        fingerprint_documents(["other"], ALL).save(file)
    assert file.read_bytes() == old and [path.name for path in tmp_path.iterdir()] == ["unit.prints"]


def test_joined_batches_are_the_whole() -> None:
    whole = fingerprint_documents(TEXTS, ALL)
    parts = [fingerprint_documents(TEXTS[start:stop], ALL) for start, stop in ((0, 3), (3, 3), (3, 7))]
    assert same(join_prints(parts, ALL), whole)
    assert same(join_prints(parts[:1], ALL), parts[0])
    assert same(join_prints([], ALL), fingerprint_documents([], ALL))


def test_the_recipe_names_what_prints_depend_on_and_nothing_else() -> None:
    base = settings(documents=True)
    assert prints_recipe(base) == prints_recipe(settings(documents=True, similarity=0.9, max_removed=0.1, ngram=3))
    near = settings(near=True)
    assert prints_recipe(near) == prints_recipe(settings(near=True, similarity=0.9, max_cluster=0.1))
    others = [{"ngram": 4}, {"bands": 21}, {"rows": 5}, {"paragraphs": True}]
    recipes = [prints_recipe(settings(near=True, **values)) for values in others]
    assert all(recipe != prints_recipe(near) for recipe in recipes)
    assert prints_recipe(settings(paragraphs=True)) != prints_recipe(settings(paragraphs=True, paragraph_bytes=99))


def test_huge_documents_pass() -> None:
    line = "the same words again and again, " * 400_000
    prints = fingerprint_documents([line, line + "x", "a" * 3_000_000], ALL)
    assert prints.signatures[0].any() and prints.bands[:, 2].all()
