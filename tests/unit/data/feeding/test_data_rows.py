"""Rows of every packing, what a model is given of them, and plans on disk."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headway.core.errors import DataError
from headway.core.process import faults
from headway.core.types import IGNORE_TARGET
from headway.data.feeding import packing_plans
from headway.data.feeding.micro_batches import micro_batch_of
from headway.data.feeding.rows import RowBlock, join_blocks, open_rows, packing_notice, padding_warning
from headway.data.store import TokenStore
from headway.models.layers.attention import PackedDocuments
from support.waits import LONG

END = 0
PACKINGS = ("concat", "best_fit", "pad")


class MemoryStore:
    """A token store in memory: documents are texts, their bytes are the tokens, each is followed by an end."""

    at_hand, is_part, end_of_text_id = True, False, END

    def __init__(self, path: Path, sources: dict[str, list[str]], dtype: str = "<u2", shift: int = 0) -> None:
        self.path = path
        self.texts = {name: [[b + shift for b in t.encode()] + [END] for t in texts] for name, texts in sources.items()}
        self.streams = {name: np.array([b for t in texts for b in t], dtype) for name, texts in self.texts.items()}
        parts = {name: {"documents": len(texts), "tokens": sum(map(len, texts))} for name, texts in self.texts.items()}
        hashes = {name: {**part, "sha256": str(hash_of(self.streams[name]))} for name, part in parts.items()}
        self.manifest = {"splits": {"train": hashes}}

    def tokens(self, split: str, source: str) -> int:
        return len(self.streams[source])

    def leaves_out_rows(self, split: str, source: str) -> bool:
        return False

    def has_mask(self, split: str, source: str) -> bool:
        return False

    def documents(self, split: str, source: str) -> NDArray[np.uint64]:
        return np.cumsum([0, *map(len, self.texts[source])]).astype(np.uint64)

    def shards(self, split: str, source: str) -> list[SimpleNamespace]:
        """Of up to ten documents each."""
        count = len(self.texts[source])
        bounds = self.documents(split, source)
        return [
            SimpleNamespace(documents=min(10, count - first), first_token=int(bounds[first]))
            for first in range(0, count, 10)
        ]

    def shard_documents(self, split: str, source: str, number: int) -> NDArray[np.uint64]:
        return self.documents(split, source)[10 * number : 10 * number + 11]

    def read(self, split: str, source: str, start: int, count: int) -> NDArray[np.integer[Any]]:
        if start + count > len(self.streams[source]):
            raise IndexError(start + count)
        return self.streams[source][start : start + count]


def hash_of(stream: NDArray[Any]) -> int:
    return int(np.uint64(np.arange(1, len(stream) + 1, dtype=np.uint64) @ stream.astype(np.uint64)))


def texts_of(count: int) -> list[str]:
    """Functions of a real module, of very different lengths."""
    texts = Path(os.__file__).read_text("utf-8").split("def ")
    assert len(texts) >= count
    return texts[:count]


def store_of(path: Path, sources: dict[str, list[str]] | None = None, **values: Any) -> TokenStore:
    path.mkdir(exist_ok=True)
    return cast(TokenStore, MemoryStore(path, sources or {"os": texts_of(25), "again": texts_of(40)[25:]}, **values))


def everything(store: TokenStore, source: str, length: int, packing: str, mask: bool = False) -> RowBlock:
    rows = open_rows(store, "train", source, length, packing, document_mask=mask)
    return rows.read(np.arange(rows.count))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_rows_hold_the_text(tmp_path: Path, packing: str, dtype: str) -> None:
    """Every token is the target of the token before it, at least where both are in one document."""
    shift = 70_000 if dtype == "<u4" else 0
    store = store_of(tmp_path, dtype=dtype, shift=shift)
    for source in ("os", "again"):
        block = everything(store, source, 64, packing, mask=True)
        assert block.tokens.dtype == np.int64 and block.documents is not None and block.documents.dtype == np.int32
        assert block.tokens.shape == block.documents.shape == (len(block), 65)
        batch = micro_batch_of(block)
        pairs = [(i, t) for i, t in zip(batch["ids"].ravel(), batch["targets"].ravel(), strict=True) if t >= 0]
        wanted = [pair for t in cast(Any, store).texts[source] for pair in itertools.pairwise(t)]
        assert len(pairs) == len(wanted) if packing != "concat" else len(wanted) - 64 <= len(pairs) <= len(wanted)
        if packing != "concat":
            assert sorted((int(i), int(t)) for i, t in pairs) == sorted(wanted)
        for row, documents in zip(block.tokens.tolist(), block.documents.tolist(), strict=True):
            pieces = [[t for t, d in zip(row, documents, strict=True) if d == n] for n in range(max(documents) + 1)]
            assert all(any(is_inside(piece, text) for text in cast(Any, store).texts[source]) for piece in pieces)
            assert [t for t, d in zip(row, documents, strict=True) if d == -1] == [END] * documents.count(-1)
            assert sorted(documents, key=lambda d: (d == -1, d)) == documents


def is_inside(piece: list[int], text: list[int]) -> bool:
    return any(text[i : i + len(piece)] == piece for i in range(len(text) - len(piece) + 1))


def test_joined_rows_follow_each_other(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    block = everything(store, "os", 64, "concat")
    assert block.documents is None
    stream = cast(Any, store).streams["os"].astype(np.int64)
    assert len(block) == (len(stream) - 1) // 64
    for number, row in enumerate(block.tokens):
        assert np.array_equal(row, stream[number * 64 : number * 64 + 65])


def test_documents_of_joined_rows(tmp_path: Path) -> None:
    store = store_of(tmp_path, {"a": ["ab", "", "cdefgh", "ijk"]})  # with their ends: 3, 1, 7 and 4 tokens
    rows = open_rows(store, "train", "a", 4, "concat", document_mask=True)
    assert rows.count == 3
    block = rows.read(np.array([2, 0, 1]))
    assert block.documents is not None
    assert block.documents.tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 1, 2], [0, 0, 0, 0, 0]]
    batch = micro_batch_of(block)
    ignored = IGNORE_TARGET
    a, b, i = ord("a"), ord("b"), ord("i")
    assert batch["ids"].tolist()[1] == [a, b, END, END]
    assert batch["targets"].tolist()[1] == [b, END, ignored, ignored]
    assert batch["targets"].tolist()[0] == [ord("h"), END, ignored, i + 1]
    assert batch["positions"].tolist() == [[0, 1, 2, 0], [0, 1, 2, 0], [0, 1, 2, 3]]


def test_what_a_model_is_given(tmp_path: Path) -> None:
    documents = np.array([[0, 0, 0, 1, 1, 2, -1, -1], [0, 0, 0, 0, 0, 0, 0, 0]], dtype=np.int32)
    tokens = np.arange(10, 26, dtype=np.int64).reshape(2, 8)
    plain, masked = (micro_batch_of(RowBlock(tokens, documents, mask)) for mask in (False, True))
    assert set(plain) == {"ids", "targets"}
    assert plain["targets"].tolist()[0] == [11, 12, 13, 14, 15, -100, -100]
    assert masked["targets"].tolist() == [[11, 12, -100, 14, -100, -100, -100], list(range(19, 26))]
    assert masked["positions"].tolist() == [[0, 1, 2, 0, 1, 0, 0], list(range(7))]
    # Five segments of inputs, filled up to eight.
    assert masked["document_bounds"].tolist() == [0, 3, 5, 6, 7, 14, 14, 14, 14]
    assert masked["document_bounds"].dtype == torch.int32
    assert masked["ids"].tolist() == plain["ids"].tolist() == tokens[:, :-1].tolist()
    assert all(value.is_contiguous() for value in masked.values())
    assert tokens.tolist() == np.arange(10, 26).reshape(2, 8).tolist(), "the caller's rows stay as they are"


@pytest.mark.parametrize("mask", [False, True])
def test_a_piece_from_another_row_begins_with_no_target(tmp_path: Path, mask: bool) -> None:
    """Where it comes from, its first token is a target already."""
    store = store_of(tmp_path, {"a": ["x", "abcdefghij", "yz"]})  # with their ends: 2, 11 and 3 tokens
    block = everything(store, "a", 4, "best_fit", mask)
    assert block.documents is not None and block.continued is not None
    rows = [bytes(row).replace(b"\0", b".") for row in block.tokens.tolist()]
    assert rows == [b"x.ij.", b"abcde", b"efghi", b"yz..."]
    targets = micro_batch_of(block)["targets"].tolist()
    assert targets[0] == [END, IGNORE_TARGET, ord("j"), END]
    parts = [
        RowBlock(block.tokens[rows], block.documents[rows], block.masked, block.continued[rows])
        for rows in (slice(0, 1), slice(1, 4))
    ]
    some = join_blocks(parts, [np.array([3]), np.arange(3)])
    assert micro_batch_of(some)["targets"].tolist() == [*targets[1:], targets[0]]
    letters = sorted(chr(t) for row in targets for t in row if t > END)
    assert letters == list("bcdefghijz"), "every token but the first of a document, once"


def test_without_the_mask_a_document_follows_from_the_one_before(tmp_path: Path) -> None:
    block = everything(store_of(tmp_path, {"a": ["x", "y"]}), "a", 4, "best_fit")
    assert micro_batch_of(block)["targets"].tolist() == [[END, ord("y"), END, IGNORE_TARGET]]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("documents", [None, [0, 0, 1, 1, -1]])
def test_inputs_and_targets_share_no_memory(rows: int, documents: list[int] | None) -> None:
    """A single row is contiguous in all its parts, so nothing would copy it by itself."""
    tokens = np.arange(5 * rows, dtype=np.int64).reshape(rows, 5)
    numbers = None if documents is None else np.array([documents] * rows, dtype=np.int32)
    batch = micro_batch_of(RowBlock(tokens, numbers, documents is not None))
    assert batch["ids"].tolist() == tokens[:, :-1].tolist()
    batch["targets"].fill_(-7)
    assert batch["ids"].min() >= 0 and tokens.min() >= 0


@pytest.mark.parametrize("packing", PACKINGS)
def test_places_are_those_that_the_model_would_find(tmp_path: Path, packing: str) -> None:
    batch = micro_batch_of(everything(store_of(tmp_path), "os", 64, packing, mask=True))
    found = PackedDocuments.of(batch["documents"])
    assert torch.equal(found.positions_BT, batch["positions"])
    bounds = batch["document_bounds"]
    assert torch.equal(found.bounds, bounds[: len(found.bounds)]) and (bounds[len(found.bounds) :] == bounds[-1]).all()


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("mask", [False, True])
def test_rows_do_not_depend_on_how_they_are_asked_for(tmp_path: Path, packing: str, mask: bool) -> None:
    store = store_of(tmp_path)
    rows = open_rows(store, "train", "os", 32, packing, document_mask=mask)
    whole = rows.read(np.arange(rows.count))
    order = np.random.default_rng(0).permutation(rows.count)
    some = rows.read(order)
    assert np.array_equal(some.tokens, whole.tokens[order])
    assert whole.documents is None or np.array_equal(cast(Any, some.documents), whole.documents[order])
    places = [np.flatnonzero(order < 5), np.flatnonzero(order >= 5)]
    joined = join_blocks([rows.read(order[place]) for place in places], places)
    assert np.array_equal(joined.tokens, some.tokens) and joined.masked == mask
    assert whole.documents is None or np.array_equal(cast(Any, joined.documents), cast(Any, some.documents))
    some.tokens[:] = -1  # the caller's own
    assert np.array_equal(rows.read(order[:1]).tokens[0], whole.tokens[order[0]])
    assert len(rows.read(np.empty(0, dtype=np.int64))) == 0


def test_sources_without_a_row(tmp_path: Path) -> None:
    """Nothing but ends of text: there is nothing to predict."""
    store = store_of(tmp_path, {"a": ["", "", ""]})
    for packing in ("best_fit", "pad"):
        rows = open_rows(store, "train", "a", 8, packing)
        assert rows.count == 0 and rows.figures().left_out_documents == 3
        assert open_rows(store, "train", "a", 8, packing).count == 0


def test_an_unknown_packing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no packing 'worst_fit'"):
        open_rows(store_of(tmp_path), "train", "os", 8, "worst_fit")


def test_the_line_at_the_start(tmp_path: Path) -> None:
    store = store_of(tmp_path, {"a": ["abcdef", "", "x" * 20], "b": ["abc"] * 3})
    rows = {name: open_rows(store, "train", name, 8, "best_fit").figures() for name in ("a", "b")}
    assert packing_notice(rows, "best_fit") == (
        "packing best_fit: a 4 rows, padding 16.67 %, 33.3 % of documents cut, 1 of one token left out;"
        " b 2 rows, padding 33.33 %, 0.0 % of documents cut"
    )


def test_best_fit_that_leaves_much_padding_is_warned_of(tmp_path: Path) -> None:
    def said(texts: list[str]) -> str | None:
        return padding_warning(
            {"a": open_rows(store_of(tmp_path, {"a": texts}), "train", "a", 8, "best_fit").figures()}, 8
        )

    # Six tokens of nine, and nothing that would fit beside them.
    assert said(["abcde"] * 3) == (
        "packing best_fit: more than 0.5 % of rows of 8 tokens is padding (a 33.33 %),"
        " since too few documents are short enough to fill them; data.packing: concat has none"
    )
    assert said(["abcde", "ab"] * 3) is None


# Plans on disk


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "headway" / "packing"


def never(*_: Any) -> Any:
    raise AssertionError("the plan is made anew")


def plan_folders(root: Path) -> list[Path]:
    return sorted(file.parent for file in root.rglob("plan.json"))


def test_a_plan_is_made_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(tmp_path / "store")
    first = everything(store, "os", 64, "best_fit")
    assert len(plan_folders(store.path)) == 1 and not cache.exists()
    monkeypatch.setattr(packing_plans, "plan_rows", never)
    again = everything(store_of(tmp_path / "store"), "os", 64, "best_fit")
    assert np.array_equal(first.tokens, again.tokens)
    for other in (("again", 64, "best_fit"), ("os", 32, "best_fit"), ("os", 64, "pad")):
        with pytest.raises(AssertionError, match="made anew"):
            everything(store, *other)


def test_a_plan_of_other_text_is_not_taken(tmp_path: Path, cache: Path) -> None:
    everything(store_of(tmp_path / "store"), "os", 64, "best_fit")
    old = plan_folders(tmp_path / "store")
    other = store_of(tmp_path / "store", {"os": texts_of(24)})
    block = everything(other, "os", 64, "best_fit")
    assert np.array_equal(
        block.tokens, everything(store_of(tmp_path, {"os": texts_of(24)}), "os", 64, "best_fit").tokens
    )
    new = plan_folders(tmp_path / "store")
    assert len(new) == 1 and new != old, "the old one is of no use any more"


@pytest.mark.parametrize("damage", ["starts.bin", "lengths.bin", "rows.bin", "continued.bin", "plan.json", "json"])
def test_a_damaged_plan_is_made_again(tmp_path: Path, cache: Path, damage: str) -> None:
    store = store_of(tmp_path / "store")
    whole = everything(store, "os", 64, "best_fit")
    folder = plan_folders(store.path)[0]
    if damage == "json":
        (folder / "plan.json").write_text("{}")
    elif damage == "plan.json":
        (folder / damage).unlink()
    else:
        (folder / damage).write_bytes((folder / damage).read_bytes()[:-8])
    assert np.array_equal(everything(store, "os", 64, "best_fit").tokens, whole.tokens)
    assert len(plan_folders(store.path)) == 1


def test_a_plan_that_lies_is_an_error(tmp_path: Path, cache: Path) -> None:
    store = store_of(tmp_path / "store")
    everything(store, "os", 64, "best_fit")
    file = plan_folders(store.path)[0] / "lengths.bin"
    lengths = np.fromfile(file, "<u4")
    for wrong in (lengths + 60, lengths * 0 + 10**6):
        wrong.astype("<u4").tofile(file)
        with pytest.raises(DataError, match="packing of source 'os' is damaged") as caught:
            everything(store, "os", 64, "best_fit")
        assert "remove that folder" in str(caught.value.fix)


def test_a_store_that_cannot_be_written(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its plans go to the user's cache, or else stay in memory; the rows are the same."""
    whole = everything(store_of(tmp_path / "writable"), "os", 64, "best_fit")
    store = store_of(tmp_path / "store")
    (store.path / "packing").write_text("in the way")
    assert np.array_equal(everything(store, "os", 64, "best_fit").tokens, whole.tokens)
    assert len(plan_folders(cache)) == 1
    assert f"is kept in {cache}, since {store.path / 'packing'}: Not a directory" in capsys.readouterr().err
    everything(store, "os", 64, "best_fit")
    assert capsys.readouterr().err == ""

    cache.rename(cache.with_name("elsewhere"))
    cache.write_text("in the way")
    assert np.array_equal(everything(store, "os", 64, "best_fit").tokens, whole.tokens)
    assert "is in memory and made again at each start, since" in capsys.readouterr().err
    assert open_rows(store_of(tmp_path / "store", {"a": [""]}), "train", "a", 8, "best_fit").count == 0


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
def test_what_the_users_cache_has_of_stores_that_are_no_more_goes_in_time(
    tmp_path: Path, cache: Path, packing: str
) -> None:
    def opened(count: int, length: int) -> list[Path]:
        store = store_of(tmp_path / f"store{count}", {"os": texts_of(count)})
        if not (store.path / "packing").exists():
            (store.path / "packing").write_text("in the way")
        open_rows(store, "train", "os", length, packing, document_mask=True).figures()
        return plan_folders(cache)

    (old,) = opened(20, 64)
    (used,) = {*opened(21, 64)} - {old}
    (young,) = {*opened(22, 64)} - {old, used}
    for folder, days in ((old, 31), (used, 31), (young, 29)):
        then = time.time() - days * 24 * 3600
        os.utime(folder, (then, then))
    assert len(opened(21, 64)) == 3  # made before, and used again
    found = opened(23, 32)
    assert len(found) == 3 and old not in found and {used, young} < {*found}


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults._passed.clear()
    monkeypatch.setenv("HEADWAY_FAULTS", "enospc@packing.block:1")
    store = store_of(tmp_path / "store")
    everything(store, "os", 64, "best_fit")
    assert plan_folders(store.path) == [] and len(plan_folders(cache)) == 1
    assert [p for p in (store.path / "packing").rglob("*") if p.is_file()] == []


def test_a_kill_leaves_no_plan(tmp_path: Path, cache: Path) -> None:
    code = (
        "import sys; from pathlib import Path; sys.path[:0] = sys.argv[2:4]; import test_data_rows as t;"
        " t.everything(t.store_of(Path(sys.argv[1])), 'os', 64, 'best_fit')"
    )
    command = [
        sys.executable,
        "-c",
        code,
        str(tmp_path / "store"),
        str(Path(__file__).parent),
        str(Path(__file__).parents[3]),
    ]
    killed = subprocess.run(command, env={**os.environ, "HEADWAY_FAULTS": "kill@packing.block"}, check=False)
    assert killed.returncode == -9
    assert plan_folders(tmp_path) == []
    everything(store_of(tmp_path / "store"), "os", 64, "best_fit")
    half_made = list((tmp_path / "store").rglob(".making-*"))
    assert len(plan_folders(tmp_path)) == 1 and len(half_made) == 1, "it may be somebody's who is still at it"
    os.utime(half_made[0], (0, 0))
    everything(store_of(tmp_path / "store", {"os": texts_of(24)}), "os", 64, "best_fit")
    assert not half_made[0].exists()


def test_workers_that_start_at_once_make_one_plan(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, real, made = store_of(tmp_path / "store"), packing_plans.plan_rows, []
    ready = threading.Barrier(4)
    read = packing_plans._read

    def look(folder: Path) -> Any:
        found = read(folder)
        if "looked" not in vars(seen):
            seen.looked = True
            ready.wait(LONG)  # all have found nothing
        return found

    def plan(*given: Any) -> Any:
        made.append(threading.get_ident())
        return real(*given)

    seen = threading.local()
    monkeypatch.setattr(packing_plans, "_read", look)
    monkeypatch.setattr(packing_plans, "plan_rows", plan)
    with ThreadPoolExecutor(4) as pool:
        blocks = list(pool.map(lambda _: everything(store, "os", 64, "best_fit"), range(4)))
    assert len(made) == 1 and all(np.array_equal(block.tokens, blocks[0].tokens) for block in blocks)


def test_without_locks_workers_may_make_the_same_plan_at_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    store = store_of(tmp_path / "store")
    real, blocks = packing_plans._publish, []

    def publish_twice(temporary: Path, folder: Path) -> None:
        """Another worker is ready just before this one."""
        monkeypatch.setattr(packing_plans, "_publish", real)
        blocks.append(everything(store, "os", 64, "best_fit"))
        real(temporary, folder)

    monkeypatch.setattr(packing_plans, "_publish", publish_twice)
    blocks.append(everything(store, "os", 64, "best_fit"))
    assert np.array_equal(blocks[0].tokens, blocks[1].tokens)
    assert len(plan_folders(store.path)) == 1 and not list(store.path.rglob(".making-*"))


def test_a_masked_row_needs_the_index_of_its_shard_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a corpus of a trillion tokens the whole would be gigabytes, in every worker."""
    store = store_of(tmp_path, {"os": texts_of(60)})
    whole = everything(store, "os", 64, "concat", mask=True)
    starts, asked = np.cumsum([0, *map(len, cast(Any, store).texts["os"])]), list[int]()
    expected = np.cumsum(np.isin(np.arange(3 * 64, 4 * 64 + 1), starts[starts > 3 * 64]))
    monkeypatch.setattr(store, "shard_documents", _counted(store.shard_documents, asked))
    rows = open_rows(store, "train", "os", 64, document_mask=True)
    block = rows.read(np.array([3]))
    assert len(asked) <= 2 and block.documents is not None and whole.documents is not None
    assert block.documents[0].tolist() == whole.documents[3].tolist() == expected.tolist()


def test_the_figures_of_joined_documents_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(tmp_path)
    figures = open_rows(store, "train", "os", 64, document_mask=True).figures()
    assert figures.documents == 25
    monkeypatch.setattr(store, "shard_documents", None)
    assert open_rows(store, "train", "os", 64, document_mask=True).figures() == figures
    other = store_of(tmp_path, {"os": texts_of(24)})
    assert open_rows(other, "train", "os", 64, document_mask=True).figures().documents == 24


def _counted(read: Callable[[str, str, int], NDArray[np.uint64]], asked: list[int]) -> Any:
    def reads(split: str, source: str, number: int) -> NDArray[np.uint64]:
        asked.append(number)
        return read(split, source, number)

    return reads
