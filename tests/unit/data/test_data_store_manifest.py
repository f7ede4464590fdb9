"""A token store's manifest: what is no name, no count or no total is refused, here and behind a URL."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headway.core.errors import DataError
from headway.core.files.hashes import sha256_file
from headway.data.store import TokenStore
from headway.data.store_manifest import parse_manifest

Manifest = dict[str, Any]


def shard(manifest: Manifest) -> Manifest:
    """The first training shard of the first source."""
    entry: Manifest = manifest["splits"]["train"]["first"]["shards"][0]
    return entry


def put(*path: str | int, value: Any) -> Callable[[Manifest], None]:
    """Put a value somewhere in the manifest."""

    def change(manifest: Manifest) -> None:
        place: Any = manifest
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


def without(*path: str | int) -> Callable[[Manifest], None]:
    """Take something out of the manifest."""

    def change(manifest: Manifest) -> None:
        place: Any = manifest
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]

    return change


PART = ("splits", "train", "first")
SHARD = (*PART, "shards", 0)

WRONG: list[tuple[Callable[[Manifest], None], str]] = [
    (
        put(*SHARD, "tokens", value=-5),
        r"splits.train.first.shards.0.tokens: .* greater than or equal to 1 \(found -5\)",
    ),
    (put(*SHARD, "tokens", value=0), r"tokens: .* greater than or equal to 1 \(found 0\)"),
    (put(*SHARD, "tokens", value=2**60), "tokens: .* less than or equal to .*1152921504606846976"),
    (put(*SHARD, "tokens", value=1.0), r"tokens: .* valid integer \(found 1.0\)"),
    (put(*SHARD, "tokens", value=True), r"tokens: .* valid integer \(found True\)"),
    (put(*SHARD, "tokens", value="7"), r"tokens: .* valid integer \(found '7'\)"),
    (without(*SHARD, "tokens"), "tokens: Field required"),
    (put(*SHARD, "documents", value=10**9), "bin has more documents than tokens"),
    (without(*SHARD, "documents"), "documents: Field required"),
    (
        put(*SHARD, "file", value="../../../escaped.bin"),
        r"file: it is not a valid name of a file or folder \(found '../../../escaped.bin'\)",
    ),
    (put(*SHARD, "file", value="/etc/passwd"), "file: it is not a valid name of a file"),
    (put(*SHARD, "file", value=".hidden.bin"), "file: it is not a valid name of a file"),
    (put(*SHARD, "file", value="a\0.bin"), "file: it is not a valid name of a file"),
    (put(*SHARD, "file", value="x" * 300 + ".bin"), "file: it is not a valid name of a file"),
    (put(*SHARD, "file", value=7), r"file: .* valid string \(found 7\)"),
    (put(*SHARD, "sha256", value="0" * 63), "sha256: .* should match pattern"),
    (put(*SHARD, "skip_tokens", value=10**12), "shards.0.skip_tokens: Extra inputs are not permitted"),
    (put(*SHARD, value=3), "shards.0: .* valid dictionary"),
    (put(*PART, "shards", value={}), "shards: .* valid list"),
    (put(*PART, "tokens", value=7), "splits.train.first: tokens is 7, but its shards have"),
    (without(*PART, "tokens"), "splits.train.first.tokens: Field required"),
    (put(*PART, "documents", value=7), "splits.train.first: documents is 7, but its shards have"),
    (put("splits", "train", "../x", value={}), "splits.train.../x.tokens: Field required"),
    (
        put("splits", "train", "x", value={"tokens": 0, "documents": 0, "shards": []}),
        "splits.train has 'x', which is not among its sources",
    ),
    (put("splits", "other", value={}), r"splits.other.* 'train' or 'validation' \(found 'other'\)"),
    (put("splits", value=[]), "splits: .* valid dictionary"),
    (put("sources", 0, "name", value="../first"), "sources.0.name: it is not a valid name of a file or folder"),
    (put("sources", 0, "tokens", value=-1), "sources.0.tokens: .* greater than or equal to 0"),
    (without("sources", 0, "documents"), "sources.0.documents: Field required"),
    (put("sources", 1, "name", value="first"), "two sources have the name 'first'"),
    (put("sources", value=[]), "sources: .* at least 1 item"),
    (put("dtype", value="float64"), "dtype: .* 'uint16' or 'uint32'"),
    (put("tokenizer", "vocab_size", value=70_000), "uint16 cannot hold the 70,000 ids of its vocabulary"),
    (put("tokenizer", "vocab_size", value=2**40), "tokenizer.vocab_size: .* less than or equal to 4294967296"),
    (put("tokenizer", "end_of_text_id", value=300), "tokenizer: an id is 300, but must be 0 to 299"),
    (put("tokenizer", "fingerprint", value="x"), "tokenizer.fingerprint: .* should match pattern"),
    (put("split", "bound", value=7), "split.bound: .* valid string"),
    (put("settings", value=None), "settings: .* valid dictionary"),
    (put("settings", "clean", value=[]), "settings.clean: .* valid dictionary"),
]


@pytest.mark.parametrize(("change", "said"), WRONG)
def test_what_cannot_be_is_named(store: TokenStore, change: Callable[[Manifest], None], said: str) -> None:
    manifest = copy.deepcopy(store.manifest)
    change(manifest)
    with pytest.raises(DataError, match="the manifest of the token store cannot be read: ") as caught:
        parse_manifest(json.dumps(manifest).encode(), "place")
    assert re.search(said, caught.value.what), caught.value.what
    assert caught.value.where == "place" and caught.value.fix


def test_a_key_that_is_given_twice_is_refused(store: TokenStore) -> None:
    content = (store.path / "manifest.json").read_text()
    twice = content.replace('"dtype"', '"dtype": "uint32",\n  "dtype"', 1)
    with pytest.raises(DataError, match="gives the key 'dtype' twice"):
        parse_manifest(twice.encode(), "place")


def test_counts_of_sources_are_compared(store: TokenStore) -> None:
    file = store.path / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["sources"][0]["tokens"] += 1
    file.write_text(json.dumps(manifest))
    (problem,) = TokenStore.open(store.path).verify()
    assert problem.startswith("manifest.json: tokens of source 'first' are ")


def rewrite(store: TokenStore, ending: str, change: Callable[[Any], None], dtype: str) -> None:
    """Change a shard's file, and have the manifest say that it is so."""
    manifest = json.loads((store.path / "manifest.json").read_text())
    entry = shard(manifest)
    file = store.path / "train" / "first" / entry["file"]
    file = file if ending == ".bin" else file.with_suffix(".idx")
    values = np.fromfile(file, dtype)
    change(values)
    values.tofile(file)
    entry["sha256" if ending == ".bin" else "index_sha256"] = sha256_file(file)
    (store.path / "manifest.json").write_text(json.dumps(manifest))


def test_files_with_the_right_hashes_are_looked_into(store: TokenStore) -> None:
    def swap(starts: Any) -> None:
        starts[1], starts[2] = starts[2], starts[1]

    def large(ids: Any) -> None:
        ids[0] = 60_000

    rewrite(store, ".idx", swap, "<u8")
    (problem,) = TokenStore.open(store.path).verify()
    assert problem.endswith(".idx: its documents do not cover the shard contiguously")
    rewrite(store, ".idx", swap, "<u8")
    assert TokenStore.open(store.path).verify() == []
    rewrite(store, ".bin", large, "<u2")
    (problem,) = TokenStore.open(store.path).verify()
    assert problem.endswith(".bin: it has the id 60,000, but the vocabulary ends at 299")


def test_documents_without_tokens_are_told(store: TokenStore) -> None:
    def empty(starts: Any) -> None:
        starts[1] = starts[2]

    rewrite(store, ".idx", empty, "<u8")
    (problem,) = TokenStore.open(store.path).verify()
    assert problem.endswith(".idx: some of its documents have no tokens")


def test_documents_without_an_end_are_counted(store: TokenStore) -> None:
    def unended(ids: Any) -> None:
        ids[-1] = 5

    rewrite(store, ".bin", unended, "<u2")
    (problem,) = TokenStore.open(store.path).verify()
    assert problem.endswith(".bin: 1 of its documents do not end with the end-of-text token")


def test_a_reference_to_documents_that_are_not_there(store: TokenStore) -> None:
    file = store.shards("train", "first")[0].file
    for place in ("0:100000", "5:2", "3:3"):
        with pytest.raises(DataError, match="do not exist in a shard"):
            store.with_shards("train", {"first": [f"{file}:{place}"]})
