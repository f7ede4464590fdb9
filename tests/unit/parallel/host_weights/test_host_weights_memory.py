"""Where masters and moments lie, chosen by what a machine has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headway.core.errors import ConfigError
from headway.core.machine.system import Machine, Space
from headway.parallel.host_weights.memory import HostMemory, HostNeed, HostRoom, found_room, needs_file

GIB = 2**30
NEED = HostNeed(kept_bytes=90 * GIB, summed_bytes=30 * GIB)


@pytest.mark.parametrize(
    ("memory_gib", "disk_gib", "in_file"),
    [(122, 0, False), (None, 0, False), (120, 200, True), (40, 180, True)],
)
def test_a_file_is_taken_where_memory_is_short(memory_gib: int | None, disk_gib: int, in_file: bool) -> None:
    memory = None if memory_gib is None else memory_gib * GIB
    assert needs_file(NEED, HostRoom(memory, disk_gib * GIB), "runs/a") == in_file


@pytest.mark.parametrize(("memory_gib", "disk_gib"), [(120, 179), (30, 1_000)])
def test_what_fits_nowhere_is_refused(memory_gib: int, disk_gib: int) -> None:
    """Sums of gradients are never in a file: they change in every micro-batch."""
    with pytest.raises(ConfigError, match=r"take 90\.0 GiB of memory, or twice that of disk") as raised:
        needs_file(NEED, HostRoom(memory_gib * GIB, disk_gib * GIB), "runs/a")
    assert "runs/a" in str(raised.value) and "optimizer.moments=bf16" in str(raised.value)


def test_the_limit_of_a_control_group_counts(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": f"MemTotal: {2**26} kB\nMemAvailable: {2**25} kB",
        "proc/self/cgroup": "0::/job",
        "sys/fs/cgroup/job/memory.max": str(8 * GIB),
        "sys/fs/cgroup/job/memory.current": str(3 * GIB),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    machine = Machine(root=tmp_path, space=lambda _: Space(10, 7))
    assert found_room(machine, tmp_path) == HostRoom(5 * GIB, 7)


@pytest.mark.parametrize("in_file", [False, True])
def test_tensors_hold_what_they_get(in_file: bool, tmp_path: Path) -> None:
    memory = HostMemory(tmp_path if in_file else None)
    values = [torch.randn(3, 1_000), torch.randn(()), torch.randn(5).bfloat16(), torch.randn(0, 4)]
    held = [memory.hold(value) for value in values]
    rest = memory.empty((7,), torch.float32).fill_(1)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(held, values, strict=True))
    assert (held[0].data_ptr() == values[0].data_ptr()) != in_file
    held[2].fill_(2)
    assert torch.equal(rest, torch.ones(7)) and torch.equal(held[0], values[0])
    assert list(tmp_path.iterdir()) == []  # a file without a name goes with its process


@pytest.mark.parametrize("in_file", [False, True])
def test_zeros_are_zero(in_file: bool, tmp_path: Path) -> None:
    memory = HostMemory(tmp_path if in_file else None)
    assert torch.equal(memory.zeros((5, 3), torch.bfloat16), torch.zeros(5, 3).bfloat16())
    assert memory.zeros((0, 3), torch.float32).shape == (0, 3)


def test_a_view_becomes_a_tensor_of_its_own() -> None:
    whole = torch.randn(100, 10)
    held = HostMemory().hold(whole[:2])
    assert torch.equal(held, whole[:2]) and held.untyped_storage().nbytes() == 80


def test_a_full_file_system_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="masters and moments"):
        HostMemory(tmp_path).empty((2**50,), torch.float32)
