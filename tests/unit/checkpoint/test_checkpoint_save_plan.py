"""Who writes what, and reading what others have cut in other ways."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.checkpoint.format import sealing
from headway.checkpoint.format.file_layout import Elements, Piece, plan_files
from headway.checkpoint.format.manifest import hash_tensors
from headway.checkpoint.format.reading import files_of
from headway.checkpoint.save.parts import CheckpointPart, write_part
from headway.checkpoint.save.publish import Publisher
from headway.checkpoint.save.save_plan import assign_writers
from headway.checkpoint.store import CheckpointStore
from headway.core.errors import CheckpointError
from headway.core.files.atomic import write_json
from headway.core.types import Block

SHAPE = (6, 4)
WHOLE = torch.arange(24.0).view(SHAPE)


def pieces(blocks: dict[str, Block]) -> list[Piece]:
    return [Piece.of(name, block) for name, block in blocks.items()]


def box(tensor: torch.Tensor, offset: tuple[int, ...], size: tuple[int, ...]) -> Block:
    cut = tensor[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
    return Block(cut.contiguous(), offset, tuple(tensor.shape))


def run(tensor: torch.Tensor, begin: int, end: int) -> Block:
    return Block(tensor.reshape(-1)[begin:end].clone(), (begin,), tuple(tensor.shape))


CUTS = {
    "whole": [Block.whole(WHOLE)],
    "rows": [box(WHOLE, (start, 0), (2, 4)) for start in (0, 2, 4)],
    "columns": [box(WHOLE, (0, 0), (6, 1)), box(WHOLE, (0, 1), (6, 3))],
    "grid": [box(WHOLE, (r, c), (3, 2)) for r in (0, 3) for c in (0, 2)],
    "runs": [run(WHOLE, begin, end) for begin, end in pairwise((0, 7, 7, 24))],
}


def save(store: CheckpointStore, workers: list[dict[str, Block]], key: bytes | None = None) -> None:
    """As several writing processes do it, one after the other."""
    shares = assign_writers([pieces(blocks) for blocks in workers])
    with store.saving(1, "test", 0) as folder:
        parts = []
        for rank, (mine, blocks) in enumerate(zip(shares, workers, strict=True)):
            images = plan_files(mine, rank, 2**20)

            def elements(piece: Piece, blocks: dict[str, Block] = blocks) -> memoryview:
                return memoryview(blocks[piece.name].local.contiguous().reshape(-1).view(torch.uint8).numpy())

            part = write_part(folder, images, Elements(elements), key=key)
            parts.append(CheckpointPart.parse(part.record()))  # as it travels
        store.publisher.finish(folder, parts, {"step": 1}, {})


@pytest.mark.parametrize("loss", ["moved", "removed", "short"])
def test_what_was_lost_while_it_was_made_is_not_published(tmp_path: Path, loss: str) -> None:
    """When somebody moves the checkpoints away, the note of another worker's process makes the folder anew."""
    store = CheckpointStore(tmp_path / "checkpoints")
    with (
        pytest.raises(CheckpointError, match=r"shard-00000\S* is gone, or is not what was"),
        store.saving(1, "a", 0) as folder,
    ):
        piece = Piece.of("a", Block.whole(WHOLE))
        part = write_part(
            folder, plan_files([piece], 0, 2**20), Elements(lambda _: memoryview(WHOLE.numpy().tobytes()))
        )
        (shard,) = folder.glob("*.safetensors")
        if loss == "moved":
            store.directory.rename(tmp_path / "elsewhere")
            write_json(folder / "note.json", {})
        elif loss == "removed":
            shard.unlink()
        else:
            shard.write_bytes(shard.read_bytes()[:-1])
        store.publisher.finish(folder, [part], {"step": 1}, {})
    assert store.folders() == []


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
@pytest.mark.parametrize("wanted", CUTS)
@pytest.mark.parametrize("saved", CUTS)
def test_what_was_cut_in_one_way_is_read_in_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: str, wanted: str, sealed: bool
) -> None:
    if sealed:
        pytest.importorskip("cryptography")
        monkeypatch.setattr(sealing, "CHUNK_BYTES", 30)  # so that parts begin and end within chunks
        monkeypatch.setenv("HEADWAY_ENCRYPTION_KEY", "ab" * 32)
    store = CheckpointStore(tmp_path)
    scalar = Block.whole(torch.tensor(3))
    save(store, [{"w": block, "step": scalar} for block in CUTS[saved]], bytes.fromhex("ab" * 32) if sealed else None)
    assert store.verify(1).damage == ()
    info = store.info(1)
    assert torch.equal(store.load(info)["w"], WHOLE)
    expected = hash_tensors({"w": WHOLE, "step": scalar.local})
    assert {name: entry.sha256 for name, entry in info.manifest.tensors.items()} == expected
    for block in CUTS[wanted]:
        mine = Block(torch.zeros_like(block.local), block.offset, block.shape)
        step = Block.whole(torch.tensor(0))
        others = {"w": ("F32", list(SHAPE)), "step": ("I64", [])}
        store.load_into(info, {"w": mine, "step": step}, lambda said, others=others: [said, others])
        assert torch.equal(mine.local, block.local) and int(step.local) == 3


def test_only_the_files_that_are_needed_are_read(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, [{"w": block} for block in CUTS["rows"]])
    (store.info(1).path / "shard-00002.safetensors").unlink()
    first = Block(torch.zeros(3, 4), (1, 0), SHAPE)  # of the first two slices
    store.load_into(store.info(1), {"w": first})
    assert torch.equal(first.local, WHOLE[1:4])


def test_everything_is_written_once_and_about_equally_much_by_each() -> None:
    same = {f"w{i}": Block.whole(torch.zeros(64, 16)) for i in range(20)}
    shares = assign_writers([pieces(same) for _ in range(4)])
    assert Counter(piece.name for share in shares for piece in share) == Counter(list(same))
    assert [len(share) for share in shares] == [5, 5, 5, 5]


def test_who_has_all_of_a_tensor_writes_it_alone() -> None:
    part, whole = box(WHOLE, (0, 0), (3, 4)), Block.whole(WHOLE)
    shares = assign_writers([pieces({"w": part}), pieces({"w": whole})])
    assert [[piece.size for piece in share] for share in shares] == [[], [(6, 4)]]


def test_empty_parts_are_nobodys_and_empty_tensors_are_kept() -> None:
    empty = Block(torch.zeros(0, 4), (6, 0), SHAPE)
    nothing = Block.whole(torch.zeros(0, 4))
    shares: list[list[Any]] = assign_writers([pieces({"w": Block.whole(WHOLE)}), pieces({"w": empty, "n": nothing})])
    assert [[piece.name for piece in share] for share in shares] == [["w"], ["n"]]


def test_a_folder_is_made_by_its_owner_only(tmp_path: Path) -> None:
    def refuse() -> None:
        raise RuntimeError("not mine")

    leftover = tmp_path / ".tmp-step-00000001-other"
    leftover.mkdir()
    with pytest.raises(RuntimeError):
        Publisher(tmp_path, refuse).begin(2, "x")
    assert leftover.exists(), "what belongs to the owner was cleared away"


def test_the_files_that_a_part_may_need_are_known_before_it_is_read(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, [{"w": block} for block in CUTS["rows"]])
    manifest = store.info(1).manifest
    everything = set(manifest.files)
    for block in CUTS["rows"]:
        assert len(files_of(manifest, "w", block)) == 1 < len(everything)
    assert files_of(manifest, "w", Block(torch.zeros(3, 4), (1, 0), SHAPE)) == everything
    assert files_of(manifest, "w", Block(torch.zeros(0, 4), (1, 0), SHAPE)) == set()
    assert files_of(manifest, "of another model", Block.whole(torch.zeros(1))) == set()
