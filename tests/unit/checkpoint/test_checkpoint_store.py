"""Saving, finding, loading and pruning."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from headway.checkpoint.format.file_layout import Piece, plan_files
from headway.checkpoint.format.manifest import MANIFEST, Manifest, Slice, hash_tensors, state_hash
from headway.checkpoint.store import CheckpointStore
from headway.core.errors import CheckpointError
from headway.core.types import Block
from support.gpu import needs_gpu
from support.states import equal, make_state, names, save


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run" / "checkpoints")


@pytest.mark.parametrize("max_shard_bytes", [1, 100, 2**30])
def test_a_state_comes_back_bit_for_bit_however_it_is_cut(tmp_path: Path, max_shard_bytes: int) -> None:
    store = CheckpointStore(tmp_path, max_shard_bytes=max_shard_bytes)
    manifest = save(store, 3)
    info = store.newest()
    assert info is not None and info.step == 3 and info.cursor == {"step": 3}
    assert equal(store.load(info), make_state(3))
    assert info.manifest == manifest and store.verify(3).good
    assert (
        manifest.state_sha256
        == CheckpointStore(tmp_path / "other").save(3, make_state(3), {"step": 3}, {}).state_sha256
    )


def test_files_are_what_the_safetensors_library_reads(store: CheckpointStore) -> None:
    manifest = save(store, 3)
    folder = store.info(3).path
    loaded = {n: t for file in manifest.files for n, t in safetensors.torch.load_file(folder / file).items()}
    assert equal(loaded, make_state(3))
    assert hash_tensors(loaded) == {name: entry.sha256 for name, entry in manifest.tensors.items()}
    assert (folder / "shard-00000.safetensors").read_bytes().count(b'"F32"') == 4
    preamble = 8 + int.from_bytes((folder / "shard-00000.safetensors").read_bytes()[:8], "little")
    assert preamble % 64 == 0, "a copy to what is not aligned takes a quarter longer"


def test_large_tensors_get_files_of_their_own() -> None:
    sizes = {"a": 10, "b": 100, "c": 5, "d": 5, "e": 1}
    pieces = [Piece(name, "F32", (size,), (0,), (size,)) for name, size in sizes.items()]
    images = plan_files(pieces, rank=2, max_bytes=40)
    assert [[piece.name for piece in image.pieces] for image in images] == [["a"], ["b"], ["c", "d"], ["e"]]
    assert [image.file for image in images][:2] == ["shard-00002.safetensors", "shard-00002-001.safetensors"]
    assert plan_files([], rank=0, max_bytes=40) == []


def test_tensors_that_share_memory_are_saved_each(store: CheckpointStore) -> None:
    flat = torch.arange(6.0)
    state = {"a": flat[:4], "b": flat[2:]}
    store.save(1, state, {"step": 1}, {})
    assert equal(store.load(store.info(1)), state)


def test_an_empty_store_has_nothing(store: CheckpointStore) -> None:
    assert store.newest() is None
    assert list(store.list()) == []
    with pytest.raises(CheckpointError, match="no checkpoint of step 3"):
        store.info(3)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        save(store, step)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    assert [info.step for info in store.list()] == [3, 4]


def test_a_damaged_later_checkpoint_does_not_push_out_the_one_just_saved(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    (tmp_path / "step-00000009").mkdir()
    save(store, 5)
    newest = store.newest(lambda _: None)
    assert newest is not None and newest.step == 5


def test_a_manifest_whose_cursor_is_of_another_step_is_not_good(tmp_path: Path) -> None:
    """A run would train steps again with weights that have seen them."""
    store = CheckpointStore(tmp_path)
    manifests = {step: save(store, step) for step in (2, 4)}
    cursor = {"step": 3}
    forged = {"cursor": cursor, "state_sha256": state_hash(manifests[4].tensors, cursor)}
    folder = tmp_path / "step-00000004"
    (folder / MANIFEST).write_bytes(manifests[4].model_copy(update=forged).render())
    (damage,) = store.verify(folder).damage
    assert "its cursor is of step 3, and the checkpoint of step 4" in damage.what
    passed_over: list[str] = []
    newest = store.newest(passed_over.append)
    assert newest is not None and newest.step == 2 and "cursor" in passed_over[0]


def test_at_least_one_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one"):
        CheckpointStore(tmp_path, keep=0)


def test_saving_the_same_state_again_changes_nothing(store: CheckpointStore) -> None:
    first = save(store, 3)
    before = (store.info(3).path / MANIFEST).stat()
    assert save(store, 3) == first
    assert (store.info(3).path / MANIFEST).stat().st_ino == before.st_ino
    assert names(store.directory) == ["step-00000003"]


def test_another_state_of_the_same_step_replaces_it(store: CheckpointStore, capsys: pytest.CaptureFixture[str]) -> None:
    save(store, 3, seed=3)
    save(store, 3, seed=4)
    assert "it holds another state" in capsys.readouterr().err
    assert equal(store.load(store.info(3)), make_state(4))
    assert names(store.directory) == ["step-00000003"]


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(store: CheckpointStore) -> None:
    save(store, 3)
    (store.info(3).path / "shard-00000.safetensors").unlink()
    save(store, 3)
    assert store.verify(3).good


@pytest.mark.parametrize("occupant", ["file", "link"])
def test_whatever_has_the_name_of_a_checkpoint_makes_room(
    store: CheckpointStore, tmp_path: Path, occupant: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    store.directory.mkdir(parents=True)
    target = store.directory / "step-00000003"
    target.touch() if occupant == "file" else target.symlink_to(elsewhere)
    save(store, 3)
    assert store.verify(3).good
    assert names(elsewhere) == ["precious"]


def test_the_time_and_context_are_recorded(store: CheckpointStore) -> None:
    context = save(store, 3).context
    assert context["attempt"] == 1 and context["world_size"] == 2 and context["time"] > 1.7e9


def test_a_save_is_refused_by_whoever_does_not_own_the_run(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path), 1)
    unfinished = tmp_path / ".tmp-step-00000002-1"
    unfinished.mkdir()

    def forbid() -> None:
        raise CheckpointError("no longer the owner")

    with pytest.raises(CheckpointError, match="no longer the owner"):
        save(CheckpointStore(tmp_path, may_write=forbid), 2)
    assert unfinished.exists(), "the owner may be writing there"


def test_ownership_is_asked_again_right_before_publishing(tmp_path: Path) -> None:
    answers = iter([None, CheckpointError("no longer the owner")])

    def ask() -> None:
        answer = next(answers)
        if answer:
            raise answer

    with pytest.raises(CheckpointError, match="no longer the owner"):
        save(CheckpointStore(tmp_path, may_write=ask), 2)
    assert names(tmp_path) == []


def test_a_type_without_a_place_in_the_format_is_named(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match=r"complex64[\s\S]*'model.spin'"):
        store.save(1, {"model.spin": torch.zeros(2, dtype=torch.complex64)}, {"step": 1}, {})
    assert not store.directory.exists(), "it was found before anything was touched"


def blocks(tensors: dict[str, torch.Tensor]) -> dict[str, Block]:
    return {name: Block.whole(tensor) for name, tensor in tensors.items()}


def test_load_into_reads_the_part_that_is_asked_for(store: CheckpointStore) -> None:
    save(store, 3)
    whole = make_state(3)["model.embedding"]
    part = Block(torch.zeros_like(whole[1:]), (1, 0), tuple(whole.shape))
    others = {name: Block.whole(tensor) for name, tensor in make_state(0).items() if name != "model.embedding"}
    store.load_into(store.info(3), {**others, "model.embedding": part})
    assert torch.equal(part.local, whole[1:])
    with pytest.raises(CheckpointError, match="only in the checkpoint"):
        store.load_into(store.info(3), others)
    elsewhere = {"model.embedding": ("F32", tuple(whole.shape))}
    store.load_into(store.info(3), others, lambda said: [said, elsewhere])


def test_load_into_fills_existing_tensors_in_place(store: CheckpointStore) -> None:
    save(store, 3)
    target = {name: torch.zeros_like(tensor) for name, tensor in make_state(0).items()}
    parameter = target["model.embedding"] = torch.nn.Parameter(target["model.embedding"])
    store.load_into(store.info(3), blocks(target))
    assert torch.equal(parameter, make_state(3)["model.embedding"]) and parameter.requires_grad
    assert equal(target, make_state(3))


@needs_gpu
def test_a_state_on_a_gpu_is_saved_as_on_the_cpu(store: CheckpointStore, tmp_path: Path) -> None:
    on_gpu = {name: tensor.cuda() for name, tensor in make_state(3).items()}
    manifest = store.save(3, on_gpu, {"step": 3}, {})
    assert manifest.state_sha256 == save(CheckpointStore(tmp_path / "cpu"), 3).state_sha256
    assert hash_tensors(on_gpu) == hash_tensors(make_state(3))
    target = {name: torch.zeros_like(tensor) for name, tensor in on_gpu.items()}
    store.load_into(store.info(3), blocks(target))
    assert equal(target, on_gpu)


def test_load_into_refuses_another_model_and_touches_nothing(store: CheckpointStore) -> None:
    save(store, 3)
    target = {name: torch.zeros_like(tensor) for name, tensor in make_state(0).items()}
    del target["model.mask"]
    target["model.new"] = torch.zeros(1)
    target["model.empty"] = torch.zeros(2, 4)
    target["model.half"] = torch.zeros(2, 3, dtype=torch.float64)
    with pytest.raises(CheckpointError) as error:
        store.load_into(store.info(3), blocks(target))
    for problem in (
        "'model.new' is not in the checkpoint",
        "'model.mask' is only in the checkpoint",
        "'model.empty' is F32 [0, 4] in the checkpoint and F32 [2, 4] here",
        "'model.half' is BF16 [2, 3] in the checkpoint and F64 [2, 3] here",
    ):
        assert problem in error.value.what
    assert not any(tensor.any() for tensor in target.values())


def test_load_into_converts_between_fp32_and_bf16(store: CheckpointStore) -> None:
    save(store, 3)
    saved = make_state(3)
    target = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    target["model.half"] = torch.zeros(2, 3)
    target["model.embedding"] = torch.zeros_like(saved["model.embedding"], dtype=torch.bfloat16)
    store.load_into(store.info(3), blocks(target))
    assert torch.equal(target["model.half"], saved["model.half"].float())
    assert torch.equal(target["model.embedding"], saved["model.embedding"].bfloat16())


def test_a_loaded_state_does_not_write_to_the_checkpoint(store: CheckpointStore) -> None:
    save(store, 3)
    for tensor in store.load(store.info(3)).values():
        tensor.zero_()
    assert store.verify(3).good


def test_a_tensor_cut_over_files_is_put_together(store: CheckpointStore) -> None:
    """As a writer on several machines would leave it."""
    manifest = save(store, 3)
    folder, whole = store.info(3).path, make_state(3)["model.embedding"]
    blocks = {"left": (0, whole[:, :1]), "right": (1, whole[:, 1:])}
    files, slices = dict(manifest.files), []
    for side, (offset, block) in blocks.items():
        name = f"{side}.safetensors"
        safetensors.torch.save_file({"model.embedding": block.contiguous()}, folder / name)
        files[name] = files["shard-00000.safetensors"].model_copy(update=file_facts(folder / name))
        slices.append(Slice(file=name, offset=(0, offset), shape=tuple(block.shape)))
    rest = {n: t for n, t in make_state(3).items() if n != "model.embedding"}
    safetensors.torch.save_file({n: t.contiguous() for n, t in rest.items()}, folder / "shard-00000.safetensors")
    files["shard-00000.safetensors"] = files["left.safetensors"].model_copy(
        update=file_facts(folder / "shard-00000.safetensors")
    )
    entry = manifest.tensors["model.embedding"].model_copy(update={"slices": tuple(slices)})
    cut = Manifest(
        **{**dict(manifest), "version": 2, "files": files, "tensors": {**manifest.tensors, "model.embedding": entry}}
    )
    (folder / MANIFEST).write_bytes(cut.render())

    assert store.verify(3).damage == ()
    assert cut.state_sha256 == manifest.state_sha256
    assert equal(store.load(store.info(3)), make_state(3))


def file_facts(path: Path) -> dict[str, object]:
    from headway.core.files.hashes import sha256_file

    return {"bytes": path.stat().st_size, "sha256": sha256_file(path), "parts_sha256": None}


def test_manifests_are_json_for_everyone(store: CheckpointStore) -> None:
    save(store, 3)
    record = json.loads((store.info(3).path / MANIFEST).read_text())
    assert record["step"] == 3 and record["files"]["shard-00000.safetensors"]["bytes"] > 0
