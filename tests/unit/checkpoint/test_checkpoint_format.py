"""The manifest as data, and the hash that names a state."""

import hashlib
import json
import os
import random
import sys
from collections.abc import Callable
from itertools import product
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.checkpoint.format import manifest as checkpoint_format
from headway.checkpoint.format.manifest import (
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
from headway.core.files.hashes import fingerprint
from support.states import make_state

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
        (
            {"cursor": {"step": 4}, "state_sha256": state_hash({"w": entry()}, {"step": 4})},
            "its cursor is of step 4, and the checkpoint of step 3",
        ),
        ({"cursor": {}, "state_sha256": state_hash({"w": entry()}, {})}, "its cursor is of step None"),
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


def boxes_of(cut: str, count: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    side = round(count**0.5)
    deep = round(count ** (1 / 3))
    half = count // 2
    return {
        "rows": [((n, 0), (1, 8)) for n in range(count)],
        "columns": [((0, n), (8, 1)) for n in range(count)],
        "grid": [((a, b), (1, 1)) for a in range(side) for b in range(side)],
        "grid of blocks": [((a, b, c), (1, 1, 1)) for a in range(deep) for b in range(deep) for c in range(deep)],
        "rows beside columns": [
            *(((0, n), (half, 1)) for n in range(half)),
            *(((n, half), (1, half)) for n in range(half)),
        ],
        "crossed bars": [
            *(((0, n, 2 * n), (half, 1, 1)) for n in range(half)),
            *(((n, 0, 2 * n + 1), (1, half, 1)) for n in range(half)),
        ],
    }[cut]


def lines_of_python(work: Callable[[], object], at_most: int) -> int:
    """Count the lines that are gone through in the module under test; one in a loop counts each time."""
    done = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal done
        if frame.f_code.co_filename != checkpoint_format.__file__:
            return None
        done += 1
        assert done <= at_most, "it takes too many"
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return done


@pytest.mark.parametrize("cut", ["rows", "columns", "grid", "grid of blocks", "rows beside columns", "crossed bars"])
def test_many_slices_take_no_more_work_each_than_few(cut: str) -> None:
    """Each with each they were four times as much work for twice as many."""

    def work(count: int) -> float:
        slices = [part(*box) for box in boxes_of(cut, count)]
        random.Random(0).shuffle(slices)
        found = []
        done = lines_of_python(lambda: found.append(checkpoint_format._any_overlap(slices)), 1000 * count)
        assert found == [False]
        return done / len(slices)

    assert work(1000) < 1.6 * work(250)


@pytest.mark.timeout(120)
def test_a_manifest_of_thousands_of_columns_is_read_in_few_steps() -> None:
    count = 4000
    files = {f"{n}.safetensors": FileEntry(bytes=8, parts_sha256=SHA) for n in range(count)}
    slices = tuple(Slice(file=f"{n}.safetensors", offset=(0, n), shape=(2, 1)) for n in range(count))
    tensors = {"w": TensorEntry.model_construct(dtype="F32", shape=(2, count), sha256=SHA, slices=slices)}
    record = manifest().model_dump(mode="json") | {
        "files": {name: {"bytes": 8, "parts_sha256": SHA} for name in files},
        "tensors": {"w": tensors["w"].model_dump(mode="json")},
        "state_sha256": state_hash(tensors, {"step": 3}),
    }
    text = json.dumps({**record, "manifest_sha256": fingerprint(record)}).encode()
    found: list[Manifest] = []
    lines_of_python(lambda: found.append(Manifest.parse(text)), 100 * count)
    # Nor does it take a look at all of them to see what is in one file.
    lines_of_python(lambda: [found[0].slices_of(name) for name in files], 20 * count)
    assert found[0].slices_of("7.safetensors") == [("w", slices[7])]


@given(
    st.integers(1, 3).flatmap(
        lambda sides: st.lists(
            st.tuples(
                st.tuples(*[st.integers(0, 4)] * sides),
                st.tuples(*[st.integers(0, 2)] * sides),
            ),
            max_size=9,
        )
    )
)
def test_an_overlap_is_found_where_two_boxes_share_an_element(boxes: list[Any]) -> None:
    elements = [
        place
        for offset, shape in boxes
        for place in product(*(range(o, o + n) for o, n in zip(offset, shape, strict=True)))
    ]
    found = checkpoint_format._any_overlap([part(offset, shape) for offset, shape in boxes])
    assert found == (len(set(elements)) < len(elements))


def test_slices_among_each_other_as_nobody_cuts_a_tensor_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_format, "_WORK_PER_SLICE", 2)
    with pytest.raises(ValueError, match="no cut of a tensor gives"):
        checkpoint_format._any_overlap([part(*box) for box in boxes_of("grid", 400)])


@pytest.mark.parametrize("shape", [(2**63,), (1,) * 65, (10**4000,) * 2])
def test_sizes_that_no_tensor_has_are_refused(shape: tuple[int, ...]) -> None:
    """Their product could take for ever."""
    with pytest.raises(ValueError, match=r"less than 9223372036854775808|at most 64 items"):
        part((0,) * len(shape), shape)


def test_a_manifest_with_a_key_twice_is_refused() -> None:
    """Readers differ in which of the two counts."""
    text = manifest().render()
    for twice in (b'"step": 3', b'"sha256": "' + SHA.encode() + b'"'):
        assert twice in text
        with pytest.raises(ValueError, match=r"gives the key '.*' twice"):
            Manifest.parse(text.replace(twice, twice + b", " + twice, 1))


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
