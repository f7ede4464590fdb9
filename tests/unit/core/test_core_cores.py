"""How many processors a process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headway.core.machine.cores import has_bf16_tiles, read_cores, usable_cores
from headway.core.machine.system import Machine


def machine(root: Path, cores: int, allowed: str, quota: str) -> Machine:
    files = {
        "sys/devices/system/cpu/online": f"0-{cores - 1}",
        "proc/self/status": f"Name:\tpython\nCpus_allowed_list:\t{allowed}\n",
        "proc/self/cgroup": "0::/job",
        "sys/fs/cgroup/job/cpu.max": quota,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Machine(root)


@pytest.mark.parametrize(
    ("allowed", "quota", "usable"),
    [("0-63", "max 100000", 64), ("0-63", "250000 100000", 2), ("0-3,8", "max 100000", 5), ("0-63", "50000 100000", 1)],
)
def test_a_container_counts_what_it_was_granted(tmp_path: Path, allowed: str, quota: str, usable: int) -> None:
    cores = read_cores(machine(tmp_path, 64, allowed, quota))
    assert (cores.seen, cores.usable) == (64, usable)


@pytest.mark.parametrize(("quota", "usable"), [("-1", 4), ("150000", 1), ("300000", 3)])
def test_a_quota_of_control_groups_1_counts_too(tmp_path: Path, quota: str, usable: int) -> None:
    here = machine(tmp_path, 8, "0-3", "max 100000")
    (tmp_path / "proc/self/cgroup").write_text("7:cpu,cpuacct:/jobs/a\n0::/other\n")
    group = tmp_path / "sys/fs/cgroup/cpu,cpuacct/jobs"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text(quota)
    (group / "cpu.cfs_period_us").write_text("100000")
    assert read_cores(here).usable == usable, "that of a group above"


def test_this_process_may_use_no_more_than_there_are() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


@pytest.mark.parametrize(("flags", "tiles"), [("avx512f amx_bf16 amx_tile", True), ("avx512f avx512_bf16", False)])
def test_tiles_are_told_by_the_processor(tmp_path: Path, flags: str, tiles: bool) -> None:
    here = machine(tmp_path, 1, "0", "max 100000")
    (tmp_path / "proc" / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: fpu {flags}\n\nprocessor\t: 1\n")
    assert has_bf16_tiles.__wrapped__(here) == tiles
    (tmp_path / "proc" / "cpuinfo").unlink()
    assert not has_bf16_tiles.__wrapped__(here)
