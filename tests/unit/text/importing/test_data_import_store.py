"""What holds for stores from any other project: whole or absent, the same each time, trained on at once."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.config.sections.data import DataConfig
from headway.core.errors import ConfigError, DataError
from headway.core.files.hashes import sha256_file
from headway.data.in_use import in_use
from headway.data.store import TokenStore
from headway.text.importing import files as import_files
from headway.text.importing import store as importing
from headway.text.importing.store import import_store, plan_import
from headway.text.inspect import describe_store, sample_text
from headway.text.preparing.prepare import prepare
from support.runs import headway, write_config


@pytest.fixture
def flat(tmp_path: Path, ids: Any) -> Path:
    """A folder with train.bin and val.bin."""
    folder = tmp_path / "flat"
    folder.mkdir()
    for name, documents in (("train", ids[:30]), ("val", ids[30:])):
        np.array([t for d in documents for t in (*d, 0)], dtype="<u2").tofile(folder / f"{name}.bin")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_it_says_what_it_is_and_where_it_comes_from(flat: Path, ids: Any, texts: Any, imported: Any) -> None:
    store, _ = imported("nanogpt", flat)
    assert store.inputs() == {} and "inputs_sha256" not in store.manifest
    files = {file["name"]: file for file in store.manifest["imported"]["files"]}
    assert store.manifest["imported"]["from"] == "nanogpt"
    for name, split in (("train.bin", "train"), ("val.bin", "validation")):
        assert files[name]["sha256"] == sha256_file(flat / name)
        assert files[name]["split"] == split and files[name]["bytes"] == (flat / name).stat().st_size
    facts = describe_store(store)
    assert facts["sources"][0]["documents"] == len(ids)
    assert facts["sources"][0]["bytes_per_token"] is None  # how long the texts were is not known
    assert sample_text(store) == texts[0][: len(sample_text(store))]
    assert str(flat.parent) not in json.dumps(store.manifest)


def test_the_same_each_time_and_wherever(flat: Path, tmp_path: Path, imported: Any) -> None:
    first, _ = imported("nanogpt", flat)
    (tmp_path / "elsewhere").mkdir()
    moved = flat.rename(tmp_path / "elsewhere" / "flat")
    os.utime(moved / "train.bin", (1, 1))
    second, _ = imported("nanogpt", moved, name="second")
    assert content(first.path) == content(second.path)


def test_shards_are_bounded(flat: Path, imported: Any, documents_of: Any) -> None:
    one, _ = imported("nanogpt", flat, name="one", shard_bytes=10**9)
    many, _ = imported("nanogpt", flat, name="many", shard_bytes=5000)
    assert len(one.shards("train", "flat")) == 1
    shards = many.shards("train", "flat")
    longest = max(len(document) for document in documents_of(one, "train"))
    assert len(shards) > 10 and all(shard.tokens <= 2500 + longest for shard in shards)
    for split in ("train", "validation"):
        assert documents_of(one, split) == documents_of(many, split)


class TestWholeOrAbsent:
    """Whatever goes wrong, what was there stays."""

    def test_a_store_is_not_replaced_unasked(self, flat: Path, tmp_path: Path, vocabulary: Path, imported: Any) -> None:
        store, _ = imported("nanogpt", flat)
        before = content(store.path)
        plan = plan_import("nanogpt", [str(flat)], tokenizer=vocabulary, names=["other"])
        with pytest.raises(ConfigError, match="there is a token store already"):
            import_store(plan, store.path)
        assert content(store.path) == before
        with in_use(store.path), pytest.MonkeyPatch.context() as patch:
            patch.setattr(importing, "_build", lambda *_: pytest.fail("it has worked"))
            with pytest.raises(DataError, match="a training reads this token store"):
                import_store(plan, store.path, force=True)
        assert content(store.path) == before
        import_store(plan, store.path, force=True)
        assert TokenStore.open(store.path).sources("train") == ["other"]

    def test_something_else_is_not_replaced_at_all(self, flat: Path, tmp_path: Path, vocabulary: Path) -> None:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.txt").write_text("...")
        with pytest.raises(DataError, match="not a token store"):
            import_store(plan_import("nanogpt", [str(flat)], tokenizer=vocabulary), tmp_path / "mine", force=True)

    def test_text_does_not_replace_it(self, flat: Path, tmp_path: Path, imported: Any) -> None:
        store, _ = imported("nanogpt", flat)
        before = content(store.path)
        (tmp_path / "a.txt").write_text("some text of its own\n" * 50)
        data = DataConfig.model_validate(
            {"sources": [str(tmp_path / "a.txt")], "store": store.path, "tokenizer": {"vocab_size": 300}}
        )
        with pytest.raises(ConfigError, match="was imported"):
            prepare(data, workers=1)
        assert content(store.path) == before
        prepare(data, workers=1, force=True)
        assert "imported" not in TokenStore.open(store.path).manifest

    @pytest.mark.slow
    def test_a_kill_leaves_what_was_there(self, flat: Path, tmp_path: Path, vocabulary: Path, imported: Any) -> None:
        store, _ = imported("nanogpt", flat)
        expected = content(store.path)
        command = ("data", "import", "nanogpt", flat, "--tokenizer", vocabulary, "-o", store.path, "--force")
        for fault in ("kill@import.file:1", "kill@import.file:2", "kill@data.publish:1"):
            assert headway(*command, faults=fault).returncode == -signal.SIGKILL
            assert content(store.path) == expected
            result = headway(*command)
            assert result.returncode == 0, result.stderr
            # The command line's shards are larger; what is in them is the same.
            assert TokenStore.open(store.path).tokens("train") == store.tokens("train")
            expected = content(store.path)
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []

    def test_a_full_disk(self, flat: Path, tmp_path: Path, vocabulary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HEADWAY_FAULTS", "enospc@import.file:2")
        with pytest.raises(DataError, match="No space left"):
            import_store(plan_import("nanogpt", [str(flat)], tokenizer=vocabulary), tmp_path / "store")
        assert not (tmp_path / "store").exists() and not (tmp_path / ".store.preparing").exists()

    def test_a_file_that_shrinks_meanwhile(self, flat: Path, tmp_path: Path, vocabulary: Path) -> None:
        plan = plan_import("nanogpt", [str(flat)], tokenizer=vocabulary)
        with (flat / "train.bin").open("r+b") as file:
            file.truncate(100)
        with pytest.raises(DataError, match="become shorter during the import"):
            import_store(plan, tmp_path / "store")


def test_one_block_is_held(tmp_path: Path, vocabulary: Path, ids: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory does not grow with the file, nor with its longest document."""
    import tracemalloc

    monkeypatch.setattr(import_files, "BLOCK_TOKENS", 2**16)
    monkeypatch.setattr("headway.text.importing.documents.DECIDING_TOKENS", 2**16)
    flat = np.array([token for document in ids for token in document], dtype="<u2")
    for name, times in (("small", 4), ("large", 40)):
        with (tmp_path / f"{name}.bin").open("wb") as file:
            for _ in range(times):
                flat.tofile(file)  # one document
    peaks = []
    for name in ("small", "large"):
        plan = plan_import("nanogpt", [str(tmp_path / f"{name}.bin")], tokenizer=vocabulary, share=0.01)
        tracemalloc.start()
        import_store(plan, tmp_path / f"store-{name}")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (tmp_path / "large.bin").stat().st_size > 10 * 2**20
    assert peaks[1] < 1.2 * peaks[0] < 6 * 2**20


class TestCommand:
    """`headway data import`."""

    @pytest.mark.slow
    def test_import_and_train(self, flat: Path, tmp_path: Path, vocabulary: Path) -> None:
        listed = headway(
            "data", "import", "nanogpt", flat, "--tokenizer", vocabulary, "--output", "store", "--dry-run", cwd=tmp_path
        )
        assert listed.returncode == 0, listed.stderr
        assert "train.bin" in listed.stdout and "validation" in listed.stdout
        assert not (tmp_path / "store").exists()
        result = headway(
            "data", "import", "nanogpt", flat, "--tokenizer", vocabulary, "--output", "store", "--json", cwd=tmp_path
        )
        assert result.returncode == 0, result.stderr
        report = json.loads(result.stdout)
        assert report["documents"] == 40 and report["validation_documents"] == 10
        assert headway("data", "verify", tmp_path / "store").returncode == 0
        inspected = headway("data", "inspect", tmp_path / "store")
        assert inspected.returncode == 0 and "n/a" in inspected.stdout
        config = write_config(tmp_path, train={"steps": 2, "sequence_length": 64, "global_batch": 4, "device": "cpu"})
        trained = headway("train", config)
        assert trained.returncode == 0, trained.stderr
        assert headway("data", "report", tmp_path / "store").returncode == 0

    @pytest.mark.slow
    def test_a_blend_trains_with_its_weights(self, tmp_path: Path, ids: Any, vocabulary: Path) -> None:
        for name, documents in (("one", ids[:20]), ("two", ids[20:])):
            np.array([t for d in documents for t in (*d, 0)], dtype="<u2").tofile(tmp_path / f"{name}.ds")
        result = headway(
            "data", "import", "datatrove", "one.ds", "two.ds", "-o", "store", "--tokenizer", vocabulary, cwd=tmp_path
        )
        assert result.returncode == 0, result.stderr
        sources = [{"name": "one", "path": "one", "weight": 3}, {"name": "two", "path": "two", "weight": 1}]
        config = write_config(
            tmp_path,
            data={"store": str(tmp_path / "store"), "sources": sources},
            train={"steps": 4, "sequence_length": 64, "global_batch": 8, "device": "cpu"},
        )
        assert headway("train", config).returncode == 0
        shown = json.loads(headway("data", "preview", config, "--json").stdout)
        assert {source["name"]: source["asked"] for source in shown["sources"]} == {"one": 0.75, "two": 0.25}

    @pytest.mark.parametrize(
        ("arguments", "code", "said"),
        [
            (("nanogpt", "flat"), 2, "--tokenizer PATH"),
            (("pickle", "flat", "--tokenizer", "V"), 2, "one of: megatron, nanogpt, datatrove"),
            (("nanogpt", "nowhere", "--tokenizer", "V"), 3, "No such file"),
            (("nanogpt", "flat", "--tokenizer", "V", "--validation-share", "0.1"), 2, "there are validation files"),
        ],
    )
    def test_what_is_wrong_is_said(
        self, flat: Path, tmp_path: Path, vocabulary: Path, arguments: tuple[str, ...], code: int, said: str
    ) -> None:
        given = [str(vocabulary) if argument == "V" else argument for argument in arguments]
        result = headway("data", "import", *given, "--output", "store", cwd=tmp_path)
        assert result.returncode == code
        assert said in result.stderr and "Traceback" not in result.stderr

    def test_help_has_examples(self) -> None:
        result = headway("data", "import", "-h")
        assert result.returncode == 0
        assert result.stdout.count("headway data import") >= 6


@pytest.mark.parametrize(("begun", "expected"), [(True, {"<|begin|>": 1}), (False, {})])
def test_what_all_documents_begin_with_is_told(
    tmp_path: Path, ids: Any, vocabulary: Path, begun: bool, expected: dict[str, int], imported: Any
) -> None:
    settings = vocabulary.with_name("tokenizer_config.json")
    settings.write_text(json.dumps({"bos_token": "<|begin|>"}))
    try:
        documents = [[1, *document, 0] for document in ids[:20]]
        if not begun:
            documents[7] = documents[7][1:]
        np.array([token for document in documents for token in document], dtype="<u2").tofile(tmp_path / "train.bin")
        store, _ = imported("nanogpt", tmp_path / "train.bin")
    finally:
        settings.unlink()
    assert store.begin_of_text == expected
    saved = json.loads((store.tokenizer_folder / "tokenizer_config.json").read_text())
    assert saved.get("add_bos_token", False) == begun
