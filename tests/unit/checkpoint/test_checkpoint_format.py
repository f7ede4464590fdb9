"""The manifest as data, and the hash that names a state."""

import hashlib
import json
import os
from typing import Any

import pytest
import torch

from headway.checkpoint.format import (
    FileEntry,
    Manifest,
    Slice,
    TensorEntry,
    hash_tensors,
    state_hash,
    step_name,
    step_of,
    tensor_bytes,
)
from headway.core.files import fingerprint
from states import make_state

SHA = "0" * 64


def entry(
    shape: tuple[int, ...] = (4, 6), *, sha256: str = SHA, slices: tuple[Slice, ...] | None = None
) -> TensorEntry:
    whole = Slice(file="a.safetensors", offset=(0,) * len(shape), shape=shape)
    return TensorEntry(dtype="F32", shape=shape, sha256=sha256, slices=slices or (whole,))


def manifest(**changes: Any) -> Manifest:
    tensors, cursor = {"w": entry()}, {"step": 3}
    values: dict[str, Any] = {
        "step": 3,
        "cursor": cursor,
        "context": {"time": 1.5},
        "state_sha256": state_hash(tensors, cursor),
        "files": {"a.safetensors": FileEntry(bytes=96, parts_sha256=SHA)},
        "tensors": tensors,
    }
    return Manifest(**{**values, **changes})


@pytest.mark.parametrize("entry", [{"parts_sha256": SHA}, {"sha256": SHA}])
def test_a_manifest_reads_back_as_it_was_written(entry: dict[str, str]) -> None:
    """And writes as it was read: an older one has the same bytes, for its hash and its signature."""
    written = manifest(
        files={"a.safetensors": FileEntry(bytes=96, **entry)}, version=4 if "parts_sha256" in entry else 2
    )
    assert Manifest.parse(written.render()) == written
    assert Manifest.parse(written.render()).render() == written.render()
    assert json.loads(written.render())["files"]["a.safetensors"] == {"bytes": 96, **entry}
    folder = {"run": {"folder": os.fsdecode(b"caf\xe9")}}  # a name that is no UTF-8
    assert Manifest.parse(manifest(context=folder).render()).context == folder


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        ({"format": "other"}, "is not the manifest of a Headway checkpoint"),
        ({"version": 5}, "format version 5; this Headway reads versions 1 to 4"),
        ({"files": {"../a.safetensors": {"bytes": 1, "parts_sha256": SHA}}}, "files"),
        ({"files": {"a.pkl": {"bytes": 1, "parts_sha256": SHA}}}, "files"),
        ({"files": {"a.safetensors": {"bytes": 96}}}, "either a sha256 or a parts_sha256"),
        ({"files": {"a.safetensors": {"bytes": 96, "sha256": SHA, "parts_sha256": SHA}}}, "either a sha256 or"),
        ({"files": {"a.safetensors": {"bytes": 96, "sha256": SHA}}}, "not of the kind that version 4 has"),
        ({"version": 2}, "not of the kind that version 2 has"),
        ({"files": {}}, "not among the files"),
        ({"cursor": {"step": 4}}, "state_sha256 does not belong"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_manifest_that_lies_is_refused(edit: dict[str, Any], complaint: str) -> None:
    record = json.loads(manifest().render())
    record.pop("manifest_sha256")
    record.update(edit)
    record["manifest_sha256"] = fingerprint(record)  # made by someone who knows the format
    with pytest.raises(ValueError, match=complaint):
        Manifest.parse(json.dumps(record).encode())


def test_rot_anywhere_in_a_manifest_is_noticed() -> None:
    text = manifest().render()
    Manifest.parse(text)
    for position in range(len(text)):
        if text[position : position + 1].isspace():
            continue
        for flipped in (text[position] ^ 1, text[position] ^ 16):
            with pytest.raises(ValueError):
                Manifest.parse(text[:position] + bytes([flipped]) + text[position + 1 :])


@pytest.mark.parametrize("text", [b"", b"\x80", b"[]", b"null", b"[" * 100_000, b"{", manifest().render()[:-30]])
def test_what_is_no_manifest_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        Manifest.parse(text)


def part(offset: tuple[int, ...], shape: tuple[int, ...]) -> Slice:
    return Slice(file="a.safetensors", offset=offset, shape=shape)


def test_slices_must_tile_their_tensor() -> None:
    entry(slices=(part((0, 0), (1, 6)), part((1, 0), (3, 6))))
    entry(slices=(part((0, 0), (4, 2)), part((0, 2), (4, 4))))
    entry(slices=(part((0, 0), (2, 3)), part((0, 3), (3, 3)), part((2, 0), (2, 3)), part((3, 3), (1, 3))))
    entry(slices=(part((17,), (7,)), part((0,), (17,)), part((24,), (0,))))


@pytest.mark.parametrize(
    ("slices", "complaint"),
    [
        ((part((0, 0), (3, 6)),), "do not cover"),
        ((part((0, 0), (2, 6)), part((1, 0), (2, 6))), "overlap"),
        ((part((0, 0), (4, 7)),), "beyond"),
        ((part((0,), (4,)),), "do not cover"),
        ((part((0,), (12,)), part((2, 0), (2, 6))), "dimensions"),
        ((part((0,), (13,)), part((12,), (12,))), "overlap"),
        ((part((0, 0), (4, 3)), part((1, 2), (3, 4))), "overlap"),
        ((part((12,), (13,)), part((0,), (12,))), "beyond"),
    ],
)
def test_slices_that_do_not_tile_are_refused(slices: tuple[Slice, ...], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        entry(slices=slices)


def test_the_state_hash_does_not_depend_on_how_a_state_is_cut_and_listed() -> None:
    cursor = {"step": 1, "skipped_steps": 0}
    cut = entry(slices=(part((0, 0), (1, 6)), part((1, 0), (3, 6))))
    one = state_hash({"a": entry((2,)), "b": entry()}, cursor)
    assert one == state_hash({"b": cut, "a": entry((2,))}, {"skipped_steps": 0, "step": 1})


def test_the_state_hash_depends_on_everything_that_is_state() -> None:
    others = [
        state_hash({"w": entry()}, {"step": 1}),
        state_hash({"v": entry()}, {"step": 1}),
        state_hash({"w": entry((6, 4))}, {"step": 1}),
        state_hash({"w": entry(sha256="1" * 64)}, {"step": 1}),
        state_hash({"w": entry().model_copy(update={"dtype": "I32"})}, {"step": 1}),
        state_hash({"w": entry()}, {"step": 2}),
        state_hash({}, {"step": 1}),
    ]
    assert len(set(others)) == len(others)


def test_the_state_hash_of_the_documentation() -> None:
    lines = b'["b",%s,[2],"%s"]\n{"step":7}' % (b'"F32"', SHA.encode())
    assert state_hash({"b": entry((2,))}, {"step": 7}) == hashlib.sha256(lines).hexdigest()


def test_tensors_are_hashed_by_their_elements_in_order() -> None:
    values = torch.tensor([[1, 2], [3, 4]], dtype=torch.int16)
    little_endian = bytes([1, 0, 3, 0, 2, 0, 4, 0])
    assert bytes(tensor_bytes(values.t())) == little_endian
    assert hash_tensors({"t": values.t()}) == {"t": hashlib.sha256(little_endian).hexdigest()}


def test_hashes_keep_their_names_whatever_the_kind_of_tensor() -> None:
    state = make_state()
    together = hash_tensors(state)
    assert list(together) == list(state)
    assert together == {name: hash_tensors({name: tensor})[name] for name, tensor in state.items()}


def test_step_names() -> None:
    assert step_name(1000) == "step-00001000"
    assert step_of("step-00001000") == 1000
    assert step_of(step_name(10**9)) == 10**9
    for name in ("step-1000", "step-0000001000", "step-0000100x", ".tmp-step-00001000", "step-00001000.old"):
        assert step_of(name) is None
