"""Opening, reading and verifying a store."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headway.core.errors import DataError
from headway.data.store import TokenStore
from headway.text.inspect import describe_store, sample_text


def whole(store: TokenStore, split: str, source: str) -> np.ndarray:
    """A source's tokens straight from its files."""
    entries = store.manifest["splits"][split][source]["shards"]
    return np.concatenate([np.fromfile(store.path / split / source / entry["file"], "<u2") for entry in entries])


def test_any_range_reads_the_same_as_the_files(store: TokenStore) -> None:
    tokens = whole(store, "train", "first")
    assert len(store.manifest["splits"]["train"]["first"]["shards"]) > 2
    assert len(tokens) == store.tokens("train", "first")
    first = store.shards("train", "first")[0].tokens
    ranges = [(0, 1), (0, len(tokens)), (first - 1, 2), (first, first), (first - 50, 1000), (len(tokens) - 1, 1)]
    ranges.append((len(tokens), 0))
    for start, count in ranges:
        assert np.array_equal(store.read("train", "first", start, count), tokens[start : start + count])
    for start, count in ((-1, 2), (0, len(tokens) + 1), (len(tokens), 1), (3, -1)):
        with pytest.raises(IndexError):
            store.read("train", "first", start, count)


def test_what_is_in_it(store: TokenStore) -> None:
    assert store.splits == ["train", "validation"]
    assert store.sources("train") == ["first", "second"]
    assert store.sources("nonsense") == []
    assert store.tokens("train") == store.tokens("train", "first") + store.tokens("train", "second")
    assert (store.vocab_size, store.end_of_text_id) == (300, 0)
    bounds = store.documents("train", "first")
    assert bounds[0] == 0 and bounds[-1] == store.tokens("train", "first")
    assert np.array_equal(whole(store, "train", "first")[bounds[1:].astype(int) - 1], np.zeros(len(bounds) - 1))
    with pytest.raises(DataError, match="no source 'third'"):
        store.tokens("train", "third")


@pytest.mark.parametrize("place", [0, 1, -2, -1])
def test_an_index_that_does_not_rise_is_refused_when_it_is_read(store: TokenStore, place: int) -> None:
    """One bit is enough for a document of a negative length, which ended `data inspect` in a traceback."""
    index = store.path / "train/first" / store.shards("train", "first")[0].file.replace(".bin", ".idx")
    starts = np.fromfile(index, "<u8")
    starts[place] ^= 2**40
    starts.tofile(index)
    with pytest.raises(DataError, match="does not match its shard") as refused:
        store.shard_documents("train", "first", 0)
    assert refused.value.where == str(index)
    with pytest.raises(DataError):
        describe_store(store)


def test_description_adds_up(store: TokenStore) -> None:
    facts = describe_store(store)
    assert sum(source["documents"] for source in facts["sources"]) == 100
    assert sum(part["tokens"] for part in facts["splits"]) == sum(source["tokens"] for source in facts["sources"])
    lengths = np.diff(store.documents("train", "first"))
    percentiles = facts["splits"][0]["length_percentiles"]
    assert percentiles["100"] == lengths.max() and percentiles["50"] in lengths
    assert sample_text(store).startswith("document 1/")
    assert json.dumps(facts)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        ("flip", "SHA-256"),
        ("cut", "bytes long, not "),
        ("remove", "missing"),
    ],
)
@pytest.mark.parametrize("name", ["train/first/*.bin", "train/second/*.idx", "tokenizer/tokenizer.json", "inputs.json"])
def test_verify_names_the_damaged_file(store: TokenStore, damage: str, expected: str, name: str) -> None:
    assert store.verify() == []
    file = sorted(store.path.glob(name))[-1]
    name = str(file.relative_to(store.path))
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif damage == "cut":
        file.write_bytes(content[:-2])
    else:
        file.unlink()
    (problem,) = store.verify()
    assert problem.startswith(f"{name}: ")
    if name.endswith(".bin"):
        assert expected in problem
        if damage != "flip":
            with pytest.raises(DataError, match=r"damaged") as caught:
                TokenStore.open(store.path)
            assert caught.value.where == str(file)
        assert TokenStore.open(store.path, check=False).verify() == [problem]


def test_progress_counts_every_byte(store: TokenStore) -> None:
    counted: list[int] = []
    store.verify(counted.append)
    assert sum(counted) == store.size_bytes > 0


def test_unusable_stores(store: TokenStore, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no token store here") as caught:
        TokenStore.open(tmp_path / "nowhere")
    assert caught.value.fix == "headway data prepare with the config of the run"
    file = store.path / "manifest.json"
    good = file.read_text()
    file.write_text(json.dumps({**json.loads(good), "version": 99}))
    with pytest.raises(DataError, match="version 99; this Headway reads headway-token-store version 2"):
        TokenStore.open(store.path)
    for bad in (good[:100], "[]", "{}"):
        file.write_text(bad)
        with pytest.raises(DataError, match="manifest of the token store cannot be read"):
            TokenStore.open(store.path)


def test_fingerprint_is_of_the_content_not_the_spelling(store: TokenStore) -> None:
    file = store.path / "manifest.json"
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps(manifest, sort_keys=True))
    assert TokenStore.open(store.path).fingerprint == store.fingerprint
    manifest["splits"]["train"]["first"]["shards"][0]["sha256"] = "0" * 64
    file.write_text(json.dumps(manifest))
    assert TokenStore.open(store.path).fingerprint != store.fingerprint
