"""A store of which something is damaged: that is made anew, and nothing else; above all not the vocabulary."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.config.sections.data import DataConfig
from headway.core.errors import DataError
from headway.data.store import TokenStore
from headway.text.preparing.prepare import prepare

Configs = Callable[..., DataConfig]


@pytest.fixture
def grown(tmp_path: Path, config: Configs, documents: Callable[..., list[str]]) -> DataConfig:
    """The config of a store whose corpus has grown since its vocabulary was trained."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, text in enumerate(documents(30)):
        (folder / f"{number:02d}.txt").write_text(text)
    data = config(folder, shard_bytes=800)
    prepare(data, workers=1)
    for number in range(10):
        (folder / f"more{number}.txt").write_text(f"zebra crossing {number} " * 40)
    prepare(data, workers=1)
    return data


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("ending", [".bin", ".idx"])
@pytest.mark.parametrize("damage", ["lost", "cut", "doubled"])
def test_a_damaged_shard_costs_no_vocabulary(grown: DataConfig, damage: str, ending: str) -> None:
    before = TokenStore.open(grown.store)
    shard = sorted((grown.store / "train" / "corpus").glob(f"*{ending}"))[0]
    if damage == "lost":
        shard.unlink()
    elif damage == "cut":
        os.truncate(shard, shard.stat().st_size - 2)
    else:  # as long as if its tokens were of the other type
        shard.write_bytes(shard.read_bytes() * 2)
    report = prepare(grown, workers=1)
    assert 0 < report.processed_bytes < report.input_bytes / 3
    assert report.fingerprint == before.fingerprint and TokenStore.open(grown.store).verify() == []


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_what_has_changed_in_its_length_is_repaired_when_asked_for(grown: DataConfig, ending: str) -> None:
    before = TokenStore.open(grown.store)
    shards = sorted((grown.store / "train" / "corpus").glob(f"*{ending}"))
    inodes = {shard: shard.stat().st_ino for shard in shards}
    flip(shards[0])
    assert prepare(grown, workers=1).up_to_date, "lengths are right"
    report = prepare(grown, workers=1, repair=True)
    assert 0 < report.processed_bytes < report.input_bytes / 3 and not report.up_to_date
    assert report.fingerprint == before.fingerprint and TokenStore.open(grown.store).verify() == []
    assert [shard for shard in shards if shard.stat().st_ino != inodes[shard]] == shards[:1]
    assert prepare(grown, workers=1, repair=True).up_to_date


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"format": "headway-token-store", "version": 1})])
def test_a_store_that_cannot_be_read_is_not_replaced_without_a_word(grown: DataConfig, content: str) -> None:
    vocabulary = TokenStore.open(grown.store).tokenizer_fingerprint
    (grown.store / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=r"cannot be read|version 1") as caught:
        prepare(grown, workers=1)
    assert "--force" in str(caught.value.fix) and "data.tokenizer.path=STORE/tokenizer" in str(caught.value.fix)
    assert (grown.store / "manifest.json").read_text() == content
    given = grown.model_copy(
        update={"tokenizer": grown.tokenizer.model_copy(update={"path": grown.store / "tokenizer"})}
    )
    assert prepare(given, workers=1, force=True).documents == 40
    assert TokenStore.open(grown.store).tokenizer_fingerprint == vocabulary
