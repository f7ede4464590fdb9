"""Prepared token stores have the bytes that were recorded, on every machine."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import yaml

from net.runs import KEPT, kept_copy
from net.stores import RECORDED_STORE, hashes, prepare_rich
from support.runs import headway


def test_a_store_has_the_bytes_of_the_kept_one(tmp_path: Path) -> None:
    folder = kept_copy(tmp_path)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["data"]["store"] = "anew"
    (folder / "anew.yaml").write_text(yaml.safe_dump(config))
    done = headway("data", "prepare", "anew.yaml", cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    assert hashes(folder / "anew") == hashes(KEPT / "store")


def test_a_cleaned_store_of_several_formats_has_the_recorded_bytes(tmp_path: Path) -> None:
    """The names of shards follow from Python's Unicode tables too, their content does not."""
    found, recorded = hashes(prepare_rich(tmp_path)), json.loads(RECORDED_STORE.read_text())
    assert contents(found) == contents(recorded["files"])
    if recorded["unicode"] == unicodedata.unidata_version:
        assert found == recorded["files"]


def contents(files: dict[str, str]) -> list[tuple[str, str]]:
    """Return the folder and the hash of each file, without the manifest, which has the names."""
    return sorted((str(Path(name).parent), found) for name, found in files.items() if name != "manifest.json")
