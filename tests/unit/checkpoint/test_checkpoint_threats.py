"""What may have happened to a checkpoint since it was written, by bad disks, bad tools and bad people."""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.checkpoint.format.manifest import MANIFEST
from headway.checkpoint.store import CheckpointStore
from headway.checkpoint.verify import verify_checkpoint
from headway.core.errors import CheckpointError
from support.states import equal, make_state, save

SHARD = "shard-00000.safetensors"


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """Two good checkpoints in several files each."""
    store = CheckpointStore(tmp_path / "checkpoints", max_shard_bytes=100)
    for step in (1, 2):
        save(store, step)
    return store


def truncate(folder: Path) -> None:
    os.truncate(folder / SHARD, (folder / SHARD).stat().st_size - 1)


def empty(folder: Path) -> None:
    (folder / SHARD).write_bytes(b"")


def flip_in_data(folder: Path) -> None:
    data = bytearray((folder / SHARD).read_bytes())
    data[-1] ^= 1
    (folder / SHARD).write_bytes(data)


def flip_in_header(folder: Path) -> None:
    data = bytearray((folder / SHARD).read_bytes())
    data[12] ^= 1
    (folder / SHARD).write_bytes(data)


def zero(folder: Path) -> None:
    (folder / SHARD).write_bytes(bytes((folder / SHARD).stat().st_size))


def delete(folder: Path) -> None:
    (folder / SHARD).unlink()


def swap(folder: Path) -> None:
    """Two files of the same checkpoint."""
    other = folder / "shard-00000-001.safetensors"
    (folder / SHARD).rename(folder / "x")
    other.rename(folder / SHARD)
    (folder / "x").rename(other)


def take_from_another_step(folder: Path) -> None:
    """The same size and the same names in it, but other numbers."""
    shutil.copy(folder.parent / "step-00000001" / SHARD, folder / SHARD)


def link(folder: Path) -> None:
    """The right bytes, but through a link."""
    (folder / SHARD).rename(folder.parent / "elsewhere")
    (folder / SHARD).symlink_to(folder.parent / "elsewhere")


def pipe(folder: Path) -> None:
    """Opening it for reading would wait for ever."""
    (folder / SHARD).unlink()
    os.mkfifo(folder / SHARD)


def folder_in_place_of_file(folder: Path) -> None:
    (folder / SHARD).unlink()
    (folder / SHARD).mkdir()


def no_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def manifest_cut_off(folder: Path) -> None:
    os.truncate(folder / MANIFEST, 100)


def manifest_of_another_step(folder: Path) -> None:
    shutil.copytree(folder.parent / "step-00000001", folder, dirs_exist_ok=True)


def manifest_linked(folder: Path) -> None:
    (folder / MANIFEST).rename(folder.parent / "elsewhere")
    (folder / MANIFEST).symlink_to(folder.parent / "elsewhere")


def foreign_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text('{"version": 1, "sources": []}')


def folder_linked(folder: Path) -> None:
    folder.rename(folder.parent / "elsewhere")
    folder.symlink_to(folder.parent / "elsewhere")


def folder_empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def folder_is_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


IN_FILES = [truncate, empty, flip_in_data, flip_in_header, zero, delete, swap, take_from_another_step, link, pipe]
IN_FILES += [folder_in_place_of_file]
ELSEWHERE = [no_manifest, manifest_cut_off, manifest_of_another_step, manifest_linked, foreign_manifest]
ELSEWHERE += [folder_linked, folder_empty, folder_is_a_file]


@pytest.mark.parametrize("harm", IN_FILES + ELSEWHERE)
def test_the_newest_is_passed_over_with_the_reason(store: CheckpointStore, harm: Callable[[Path], None]) -> None:
    harm(store.directory / "step-00000002")
    said: list[str] = []
    info = store.newest(said.append)
    assert info is not None and info.step == 1
    assert equal(store.load(info), make_state(1))
    assert len(said) == 1 and "passing over" in said[0] and "step-00000002" in said[0]


@pytest.mark.parametrize("harm", IN_FILES)
def test_full_verification_names_file_and_tensors(store: CheckpointStore, harm: Callable[[Path], None]) -> None:
    tensors = {name for name, _ in store.info(2).manifest.slices_of(SHARD)}
    harm(store.directory / "step-00000002")
    result = store.verify(2)
    assert not result.good
    damage = result.damage[0]
    assert damage.file == SHARD
    assert damage.tensors and set(damage.tensors) <= tensors
    assert store.verify(1).good


@pytest.mark.parametrize("harm", IN_FILES + ELSEWHERE)
def test_nothing_is_ever_started_over_when_no_checkpoint_is_good(
    store: CheckpointStore, harm: Callable[[Path], None]
) -> None:
    harm(store.directory / "step-00000002")
    shutil.rmtree(store.directory / "step-00000001")
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints verifies"):
        store.newest(lambda _: None)


def test_a_flipped_bit_is_traced_to_its_tensor(store: CheckpointStore) -> None:
    one_file = CheckpointStore(store.directory.with_name("whole"))
    save(one_file, 2)
    flip_in_data(one_file.directory / "step-00000002")
    # The narrowest elements lie last.
    assert one_file.verify(2).damage[0].tensors == ("model.mask",)


def test_every_flipped_byte_of_a_file_is_found(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    path = tmp_path / "step-00000001" / SHARD
    data = path.read_bytes()
    for position in range(0, len(data), 7):
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x80]) + data[position + 1 :])
        assert not verify_checkpoint(path.parent).good, position


def test_a_quick_look_finds_what_needs_no_reading(store: CheckpointStore) -> None:
    folder = store.directory / "step-00000002"
    flip_in_data(folder)
    assert store.verify(2, full=False).good
    truncate(folder)
    assert not store.verify(2, full=False).good


def test_loading_does_not_trust_the_files(store: CheckpointStore) -> None:
    info = store.info(2)
    swap(info.path)
    with pytest.raises(CheckpointError, match="holds other tensors than the manifest says"):
        store.load(info)
    delete(info.path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        store.load(info)


def test_a_pickle_in_the_folder_is_never_opened(store: CheckpointStore, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return (os.mkdir, (str(tmp_path / "exploded"),))

    folder = store.directory / "step-00000002"
    for name in ("optimizer.pt", "pytorch_model.bin", "extra.pkl"):
        (folder / name).write_bytes(pickle.dumps(Bomb()))
    info = store.newest()
    assert info is not None and equal(store.load(info), make_state(2))
    # Also not when it has taken the place of a file that is read.
    (folder / SHARD).write_bytes(pickle.dumps(Bomb()))
    assert not store.verify(2).good
    with pytest.raises(CheckpointError):
        store.load(info)
    assert not (tmp_path / "exploded").exists()


def test_an_unreadable_folder_of_checkpoints_is_no_empty_one(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    with pytest.raises(CheckpointError, match="cannot be listed"):
        CheckpointStore(tmp_path / "checkpoints").newest()
