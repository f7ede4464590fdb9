"""Four recorded machines, and everything that is wrong with each."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.lab.doctor.findings import Finding, worst
from support.doctor import CLOUD, CONTAINER, H100, LAPTOP, MACHINES, Recorded


def text_of(findings: list[Finding]) -> str:
    return "\n".join(finding.what for finding in findings)


def problems(machine: Recorded, folder: Path, **options: object) -> list[tuple[str, str]]:
    found = machine.findings(folder, **options)
    return [(name, item.what) for name, items in found.items() for item in items if item.level in ("warning", "error")]


def test_a_healthy_node_has_nothing_wrong(tmp_path: Path) -> None:
    examined = H100.examination(tmp_path).examine()
    assert worst(examined) == "note"
    found = {item.subject: list(item.findings) for item in examined}
    assert "8 x NVIDIA H100 80GB HBM3, 79.6 GiB, compute capability 9.0" in text_of(found["GPUs"])
    assert "NVLink between all GPUs through NVSwitch: NV18" in text_of(found["GPUs"])
    assert "CUDA 13.0 on driver 580.82.07" in text_of(found["CUDA"])
    assert "NCCL 2.29.3" in text_of(found["CUDA"])
    assert text_of(found["Network"]).count("InfiniBand, 400 Gb/s, ACTIVE") == 8
    assert "bond0: up, 50 Gb/s, MTU 9000, the one for sockets" in text_of(found["Network"])
    assert "docker0" not in text_of(found["Network"])
    assert "GPUDirect RDMA through nvidia_peermem" in text_of(found["Network"])
    assert "224 logical processors, 112 cores, 2 sockets, 2 NUMA nodes" in text_of(found["Processor"])
    assert "AMX-BF16" in text_of(found["Processor"])
    assert "lustre (network)" in text_of(found["Storage"])
    assert "chrony, 0.012 ms off" in text_of(found["Clock"])
    assert text_of(found["NCCL profile"]).startswith("nvlink: NVSwitch with 18 links")


def test_a_cloud_machine_without_rdma_takes_ethernet(tmp_path: Path) -> None:
    assert problems(CLOUD, tmp_path) == []
    found = CLOUD.findings(tmp_path / "again")
    assert "no NVLink: some pairs talk over PCIe (PHB)" in text_of(found["GPUs"])
    assert "no RDMA device" in text_of(found["Network"])
    assert text_of(found["NCCL profile"]).startswith("ethernet: ")
    assert "ext4 on NVMe" in text_of(found["Storage"])


def test_a_laptop_is_short_of_memory_disk_and_files(tmp_path: Path) -> None:
    said = problems(LAPTOP, tmp_path)
    assert [subject for subject, _ in said] == ["Memory", "Memory", "Storage", "Storage", "Limits"]
    text = "\n".join(what for _, what in said)
    assert "878.9 MiB of 15.3 GiB memory is free" in text
    assert "swap is in use" in text
    assert "is in memory: it is gone after a restart" in text
    assert "only 1,024 open files" in text
    found = LAPTOP.findings(tmp_path / "again", folders={"store": Path("/home/me/data")})
    assert "no NVIDIA GPU" in text_of(found["GPUs"])
    assert "ext4 on a rotating disk" in text_of(found["Storage"])
    assert "frequency governor powersave" in text_of(found["Processor"]), "intel_pstate's powersave is dynamic"
    assert "CUDA" not in found and "GPU processes" not in found


def test_a_container_shows_what_it_was_granted(tmp_path: Path) -> None:
    folders = {"runs": Path("/scratch/runs"), "store": Path("/data/store")}
    said = problems(CONTAINER, tmp_path, folders=folders)
    assert [subject for subject, _ in said] == ["Processor", "Memory", "Storage"]
    assert "may use 2 of the 64 processors" in said[0][1]
    assert "64.0 MiB of 64.0 MiB are free in /dev/shm" in said[1][1]
    assert said[2][1] == "store (/data/store): read-only"
    found = CONTAINER.findings(tmp_path / "again")
    (limit,) = [item for item in found["Processor"] if item.level == "warning"]
    assert limit.where == "/sys/fs/cgroup/cpu.max"
    assert limit.command == "export OMP_NUM_THREADS=2; headway train ... parallel.threads=2"
    assert "8.0 GiB of the machine's 256.0 GiB" in text_of(found["Memory"])
    assert "5.0 GiB of 8.0 GiB memory is free" in text_of(found["Memory"])
    assert "eth0: up, 10 Gb/s, MTU 1500, virtual, the one for sockets" in text_of(found["Network"])


@pytest.mark.parametrize("name", MACHINES)
def test_every_problem_says_where_and_what_to_do(name: str, tmp_path: Path) -> None:
    for findings in MACHINES[name].findings(tmp_path).values():
        for finding in findings:
            if finding.level in ("warning", "error"):
                assert finding.where and finding.fix, finding


def test_a_machine_that_tells_nothing_is_no_crash(tmp_path: Path) -> None:
    found = Recorded({}, torch=None).findings(tmp_path)
    assert "could not be examined" not in "\n".join(text_of(items) for items in found.values())
    assert "PyTorch is not installed" in text_of(found["Versions"])
    assert "unknown processor" in text_of(found["Processor"])


def test_what_one_subject_cannot_cope_with_does_not_stop_the_others(tmp_path: Path) -> None:
    odd = LAPTOP.but(files={"/proc/self/mountinfo": "nonsense"})
    found = odd.findings(tmp_path)
    (finding,) = found["Storage"]
    assert finding.level == "warning" and "could not be examined" in finding.what
    assert "Limits" in found and "Environment" in found
