# ruff: noqa: E501  (a table, with one row for each case)
"""One thing made wrong at a time: each must be found, at its level, and only then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from headway.core.machine.system import Output, Space
from headway.lab.doctor import storage
from headway.lab.doctor.findings import Finding
from headway.lab.doctor.memory import examine_memory
from headway.lab.doctor.processor import examine_processor
from headway.lab.doctor.software import TorchFacts
from support.doctor import (
    CLOUD,
    CONTAINER,
    CPU_TORCH,
    CUDA_TORCH,
    GIB,
    H100,
    LAPTOP,
    LIMITS,
    MEMINFO,
    QUERY,
    TOPOLOGY,
    Recorded,
    gpu_xml,
    interface,
    rdma,
    smi_xml,
    topology,
)


def a10(**changed: str) -> Recorded:
    """The cloud machine with its second GPU changed."""
    return CLOUD.but(
        commands={QUERY: smi_xml([gpu_xml("NVIDIA A10G", 23028), gpu_xml("NVIDIA A10G", 23028, **changed)])}
    )


def limits(**values: object) -> str:
    return LIMITS.format(**{"processes": 250_000, "files": 65_536, "locked": 8_388_608, **values})


def meminfo(**values: int) -> str:
    return MEMINFO.format(**{"total": 65_000_000, "available": 60_000_000, "swap": 0, "swap_free": 0, **values})


def environment(**variables: str) -> Recorded:
    return H100.but(environment=variables)


USER = "<process_info><pid>4711</pid><type>C</type><process_name>python</process_name><used_memory>900 MiB</used_memory></process_info>"
DESKTOP = USER.replace("<type>C<", "<type>G<")
SCALING = "/sys/devices/system/cpu/cpu0/cpufreq/scaling"
CHRONY, SYSTEMD = "chronyc -n tracking", "timedatectl show --property=NTPSynchronized --value"
PCI = {"/sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de", "/sys/bus/pci/devices/0000:01:00.0/class": "0x030200"}
SOME_NVLINK = Output("ok", "\tGPU0\tGPU1\tCPU Affinity\nGPU0\tX\tNV4\t0-7\nGPU1\tPHB\tX\t0-7\n")
NO_MODULE = {"/sys/module/nvidia_peermem/": None}

#: Sound machine, machine with one thing wrong, subject, level, words of the finding.
CASES: dict[str, tuple[Recorded, Recorded, str, str, str]] = {
    "smi fails": (CLOUD, CLOUD.but(commands={QUERY: Output("failed", "couldn't communicate")}), "GPUs", "error", "nvidia-smi fails: couldn't"),
    "smi hangs": (CLOUD, CLOUD.but(commands={QUERY: Output("silent")}), "GPUs", "error", "does not answer"),
    "smi talks nonsense": (CLOUD, CLOUD.but(commands={QUERY: Output("ok", "<no")}), "GPUs", "error", "is no XML"),
    "no driver": (LAPTOP, LAPTOP.but(files=PCI), "GPUs", "error", "on the PCI bus, but there is no nvidia-smi"),
    "two kinds": (CLOUD, CLOUD.but(commands={QUERY: smi_xml([gpu_xml("A", 1), gpu_xml("B", 1)])}), "GPUs", "warning", "different kinds"),
    "broken memory": (CLOUD, a10(failure="Yes"), "GPUs", "error", "GPU 1: broken memory could not be replaced"),
    "pending row": (CLOUD, a10(pending="Yes"), "GPUs", "warning", "replaced at the next reset"),
    "uncorrected": (CLOUD, a10(sram_uncorrectable="3"), "GPUs", "error", "3 uncorrected memory errors"),
    "too hot": (CLOUD, a10(hw_thermal_slowdown="Active"), "GPUs", "warning", "slowed down: too hot"),
    "few lanes": (CLOUD, a10(width="4x"), "GPUs", "warning", "uses 4 of 16 PCIe lanes"),
    "no fabric": (CLOUD, a10(state="In Progress"), "GPUs", "error", "has not joined the NVSwitch fabric"),
    "bad fabric": (CLOUD, a10(state="Completed", status="Unknown"), "GPUs", "error", "failed to join"),
    "persistence": (CLOUD, a10(persistence_mode="Disabled"), "GPUs", "note", "persistence mode is off on GPU 1"),
    "ecc": (CLOUD, a10(current_ecc="Disabled"), "GPUs", "note", "ECC is off on GPU 1"),
    "mig": (CLOUD, a10(current_mig="Enabled"), "GPUs", "warning", "MIG is on (GPU 1)"),
    "no topology": (CLOUD, CLOUD.but(commands={TOPOLOGY: Output("failed")}), "GPUs", "note", "could not be determined"),
    "some NVLink": (CLOUD, CLOUD.but(commands={TOPOLOGY: SOME_NVLINK}), "GPUs", "note", "not between all GPUs: some pairs talk over PCIe (NV4, PHB)"),
    "far GPUs": (CLOUD, CLOUD.but(commands={TOPOLOGY: topology(2, 0, link="SYS")}), "GPUs", "note", "through the CPUs"),
    "busy GPU": (CLOUD, a10(extra=USER), "GPU processes", "warning", "GPU 1 is used by process 4711 (python, 900.0 MiB)"),
    "CPU build": (CLOUD, replace(CLOUD, torch=CPU_TORCH), "CUDA", "error", "built for the CPU only"),
    "old driver": (CLOUD, CLOUD.but(commands={QUERY: smi_xml([gpu_xml("A", 1)], driver="550.90", cuda="12.4")}), "CUDA", "error", "the driver runs CUDA 12.4 at most"),
    "blind torch": (CLOUD, replace(CLOUD, torch=replace(CUDA_TORCH, sees_gpus=False)), "CUDA", "error", "sees none of the GPUs"),
    "no kernels": (CLOUD, replace(CLOUD, torch=replace(CUDA_TORCH, architectures=("sm_90", "compute_90"))), "CUDA", "error", "no kernels for compute capability 8.6"),
    "no torch": (CLOUD, replace(CLOUD, torch=None), "Versions", "error", "PyTorch is not installed"),
    "new torch": (CLOUD, replace(CLOUD, torch=TorchFacts("2.14.0", "13.0")), "Versions", "error", "outside the versions"),
    "old torch": (CLOUD, replace(CLOUD, torch=TorchFacts("2.9.1", "13.0")), "Versions", "error", "outside the versions"),
    "no extra": (CLOUD, replace(CLOUD, installed=()), "Versions", "note", "extra 'parquet' is not installed (pyarrow)"),
    "no verbs": (H100, H100.but(files={f"/dev/infiniband/uverbs{n}": None for n in range(9)}), "Network", "warning", "cannot open them"),
    "port down": (H100, H100.but(files=rdma("mlx5_3", state="1: DOWN")), "Network", "note", "mlx5_3 port 1: InfiniBand, 400 Gb/s, DOWN"),
    "no manager": (H100, H100.but(files=rdma("mlx5_3", state="2: INIT")), "Network", "warning", "no subnet manager"),
    "slower port": (H100, H100.but(files=rdma("mlx5_3", rate=200)), "Network", "note", "mlx5_3 port 1 has 200 Gb/s where others have 400"),
    "no gpudirect": (H100, H100.but(files=NO_MODULE), "Network", "warning", "no GPUDirect"),
    "no address": (CLOUD, CLOUD.but(files={"/proc/net/route": ""}), "Network", "note", "training stays on this machine"),
    "slow network": (CLOUD, CLOUD.but(files=interface("ens5", speed=10_000)), "Network", "note", "ens5 has 10 Gb/s"),
    "small packets": (CLOUD, CLOUD.but(files=interface("ens5", speed=100_000)), "Network", "note", "MTU of 1500 bytes"),
    "quota": (CLOUD, CLOUD.but(files={"/sys/fs/cgroup/cpu.max": "350000 100000"}), "Processor", "warning", "may use 3.5 of the 16"),
    "affinity": (CLOUD, CLOUD.but(files={"/proc/self/status": "Cpus_allowed_list:\t0-2,8"}), "Processor", "note", "may run on 4 of 16"),
    "no AVX2": (CLOUD, CLOUD.but(files={"/proc/cpuinfo": "processor: 0\nflags: fpu sse2"}), "Processor", "warning", "no AVX2"),
    "powersave": (CLOUD, CLOUD.but(files={f"{SCALING}_governor": "powersave", f"{SCALING}_driver": "acpi-cpufreq"}), "Processor", "warning", "lowest frequency"),
    "hyper-threads": (CLOUD, CLOUD.but(files={"/sys/devices/system/cpu/smt/active": "1"}), "Processor", "note", "hyper-threads are on"),
    "numa": (CLOUD, CLOUD.but(files={f"/sys/devices/system/node/node{n}/": "" for n in range(4)}), "Processor", "note", "in 4 NUMA nodes"),
    "little memory": (CLOUD, CLOUD.but(files={"/proc/meminfo": meminfo(available=6_000_000)}), "Memory", "warning", "memory is free"),
    "swapping": (CLOUD, CLOUD.but(files={"/proc/meminfo": meminfo(swap=1000, swap_free=700)}), "Memory", "warning", "swap is in use"),
    "memory limit": (CLOUD, CLOUD.but(files={"/sys/fs/cgroup/memory.max": str(GIB)}), "Memory", "note", "1.0 GiB of the machine's 62.0 GiB"),
    "no shm": (CLOUD, CLOUD.but(spaces={"/dev/shm": Space(2**26, 2**26)}), "Memory", "warning", "free in /dev/shm: NCCL"),
    "low disk": (CLOUD, CLOUD.but(spaces={"/": Space(200 * GIB, 19 * GIB)}), "Storage", "warning", "12 bytes per parameter"),
    "full disk": (CLOUD, CLOUD.but(spaces={"/": Space(200 * GIB, GIB // 2)}), "Storage", "error", "512.0 MiB of 200.0 GiB free"),
    "read-only": (CLOUD, CLOUD.but(files={"/proc/self/mountinfo": "27 1 259:1 / / rw - ext4 /dev/nvme0n1 ro"}), "Storage", "error", "read-only"),
    "in memory": (CLOUD, CLOUD.but(files={"/proc/self/mountinfo": "27 1 0:5 / / rw - tmpfs tmpfs rw"}), "Storage", "warning", "is in memory"),
    "chrony lost": (H100, H100.but(commands={CHRONY: Output("ok", "Leap status     : Not synchronised")}), "Clock", "warning", "not synchronised"),
    "clock off": (H100, H100.but(commands={CHRONY: Output("ok", "System time : 7.5 seconds slow of NTP time\nLeap status : Normal")}), "Clock", "warning", "7.5 s off"),
    "no ntp": (CLOUD, CLOUD.but(commands={SYSTEMD: Output("ok", "no\n")}), "Clock", "warning", "not synchronised"),
    "no time service": (CLOUD, CLOUD.but(commands={SYSTEMD: Output("failed", "no bus")}), "Clock", "note", "unknown"),
    "few files": (CLOUD, CLOUD.but(files={"/proc/self/limits": limits(files=1024)}), "Limits", "warning", "only 1,024 open files"),
    "few processes": (CLOUD, CLOUD.but(files={"/proc/self/limits": limits(processes=1024)}), "Limits", "warning", "only 1,024 processes"),
    "core files": (CLOUD, CLOUD.but(files={"/proc/self/limits": limits().replace("size        0 ", "size        unlimited ")}), "Limits", "note", "core file of any size"),
    "locked memory": (H100, H100.but(files={"/proc/self/limits": limits()}), "Limits", "warning", "8.0 MiB of memory may be locked"),
    "threads": (CONTAINER, CONTAINER.but(environment={"OMP_NUM_THREADS": "64"}), "Environment", "warning", "may use 2 cores"),
    "threads?": (H100, environment(OMP_NUM_THREADS="many"), "Environment", "warning", "is no number"),
    "blocking": (H100, environment(CUDA_LAUNCH_BLOCKING="1"), "Environment", "warning", "waits for every GPU kernel"),
    "detail": (H100, environment(TORCH_DISTRIBUTED_DEBUG="detail"), "Environment", "warning", "checked between all workers"),
    "renamed": (H100, environment(NCCL_BLOCKING_WAIT="1"), "Environment", "note", "has been renamed"),
    "interface": (H100, environment(NCCL_SOCKET_IFNAME="=eth7"), "Environment", "error", "no such interface is up"),
    "gloo interface": (H100, environment(GLOO_SOCKET_IFNAME="bond"), "Environment", "error", "no such interface is up"),
    "ib off": (H100, environment(NCCL_IB_DISABLE="1"), "Environment", "warning", "although RDMA devices such as mlx5_0"),
    "ib off and on": (H100, environment(NCCL_IB_DISABLE="1", NCCL_IB_HCA="mlx5"), "Environment", "warning", "contradict each other"),
    "no such hca": (H100, environment(NCCL_IB_HCA="=mlx4_0:1"), "Environment", "warning", "RDMA devices here are: mlx5_0"),
    "no nvls": (CLOUD, CLOUD.but(environment={"NCCL_NVLS_ENABLE": "1"}), "Environment", "warning", "but there are none"),
    "hidden GPUs": (CLOUD, CLOUD.but(environment={"CUDA_VISIBLE_DEVICES": ""}), "Environment", "warning", "hides every GPU"),
    "no such GPU": (CLOUD, CLOUD.but(environment={"CUDA_VISIBLE_DEVICES": "0,5"}), "Environment", "warning", "there is no GPU 5"),
    "leftovers": (H100, environment(RANK="0", WORLD_SIZE="2"), "Environment", "warning", "without torchrun"),
    "preload": (H100, environment(LD_PRELOAD="/x.so"), "Environment", "note", "loads /x.so"),
    "no folder": (H100, environment(PYTHONPATH="/gone"), "Environment", "note", "which does not exist"),
    "hiding": (H100, H100.but(files={"/home/me/random.py": ""}, environment={"PYTHONPATH": "/home/me"}), "Environment", "warning", "/home/me/random.py hides"),
    "other torch": (H100, H100.but(files={"/opt/x/torch/": ""}, environment={"PYTHONPATH": "/opt/x"}), "Environment", "note", "takes torch from /opt/x"),
}  # fmt: skip


def seen(machine: Recorded, folder: Path, subject: str, level: str, words: str) -> list[Finding]:
    findings = machine.findings(folder).get(subject, [])
    return [finding for finding in findings if finding.level == level and words in finding.what]


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_is_found(name: str, tmp_path: Path) -> None:
    sound, broken, subject, level, words = CASES[name]
    (finding,) = seen(broken, tmp_path / "broken", subject, level, words)
    assert finding.where or level in ("note", "error")
    assert not seen(sound, tmp_path / "sound", subject, level, words)


@pytest.mark.parametrize(
    ("machine", "subject", "words"),
    [
        (a10(extra=DESKTOP), "GPU processes", "is used by"),
        (environment(NCCL_SOCKET_IFNAME="bo"), "Environment", "no such interface"),
        (environment(NCCL_SOCKET_IFNAME="^docker"), "Environment", "no such interface"),
        (environment(NCCL_IB_HCA="mlx5"), "Environment", "RDMA devices here"),
        (environment(CUDA_LAUNCH_BLOCKING="0"), "Environment", "waits"),
        (environment(RANK="0", WORLD_SIZE="2", TORCHELASTIC_RUN_ID="x"), "Environment", "without torchrun"),
        (environment(CUDA_VISIBLE_DEVICES="GPU-8932f937,7"), "Environment", "GPU"),
        (replace(CLOUD, torch=replace(CUDA_TORCH, architectures=("compute_80",))), "CUDA", "no kernels"),
    ],
)
def test_what_is_sound_is_left_alone(machine: Recorded, subject: str, words: str, tmp_path: Path) -> None:
    assert words not in "\n".join(finding.what for finding in machine.findings(tmp_path).get(subject, []))


def test_dmabuf_takes_the_open_modules_and_a_new_kernel(tmp_path: Path) -> None:
    version = {"/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07"}
    modern = H100.but(files={**NO_MODULE, **version})
    assert seen(modern, tmp_path / "a", "Network", "ok", "through dmabuf")
    old = modern.but(files={"/proc/sys/kernel/osrelease": "5.4.0-190-generic"})
    assert seen(old, tmp_path / "b", "Network", "warning", "no GPUDirect")


def test_limits_of_version_1_control_groups(tmp_path: Path) -> None:
    old = CLOUD.but(
        files={
            "/proc/self/cgroup": "4:memory:/docker/ab\n3:cpu,cpuacct:/docker/ab\n0::/",
            "/sys/fs/cgroup/cpu,cpuacct/docker/ab/cpu.cfs_quota_us": "400000",
            "/sys/fs/cgroup/cpu,cpuacct/docker/ab/cpu.cfs_period_us": "100000",
            "/sys/fs/cgroup/cpu,cpuacct/docker/cpu.cfs_quota_us": "-1",
            "/sys/fs/cgroup/cpu,cpuacct/docker/cpu.cfs_period_us": "100000",
            "/sys/fs/cgroup/memory/docker/ab/memory.limit_in_bytes": "9223372036854771712",
            "/sys/fs/cgroup/memory/docker/memory.limit_in_bytes": str(8 * GIB),
            "/sys/fs/cgroup/memory/docker/memory.usage_in_bytes": str(7 * GIB),
            "/sys/fs/cgroup/memory/docker/memory.stat": f"cache 1\ntotal_inactive_file {4 * GIB}",
        }
    )
    assert seen(old, tmp_path, "Processor", "warning", "may use 4 of the 16")
    assert seen(old, tmp_path, "Memory", "note", "8.0 GiB of the machine's")
    assert seen(old, tmp_path, "Memory", "ok", "5.0 GiB of 8.0 GiB memory is free"), "idle pages of files are free"


def test_an_older_driver_names_reasons_and_capabilities_differently(tmp_path: Path) -> None:
    answer = CLOUD.commands[QUERY].text.replace("clocks_event_reason", "clocks_throttle_reason")
    answer = answer.replace(
        ">Not Active</clocks_throttle_reason_hw_thermal", ">Active</clocks_throttle_reason_hw_thermal"
    )
    old = CLOUD.but(
        commands={
            QUERY: Output("ok", answer),
            "nvidia-smi --query-gpu=compute_cap --format=csv,noheader": Output("failed", "not a valid field"),
            "nvidia-smi -L": Output("ok", "GPU 0: NVIDIA A10G (UUID: GPU-1)\nGPU 1: NVIDIA A10G (UUID: GPU-2)\n"),
        }
    )
    assert len([f for f in old.findings(tmp_path)["GPUs"] if "too hot" in f.what]) == 2
    assert seen(old, tmp_path, "GPUs", "ok", "2 x NVIDIA A10G, 22.5 GiB")
    assert old.examination(tmp_path).interconnect.gpus == 2
    assert "compute capability" not in seen(old, tmp_path, "GPUs", "ok", "2 x NVIDIA A10G")[0].what, "n/a, not guessed"


def test_an_old_python_and_a_source_tree(tmp_path: Path) -> None:
    software = replace(CLOUD.software(), python=(3, 10, 2), requirements=())
    found = CLOUD.findings(tmp_path, software=software)["Versions"]
    assert [(f.level, f.what) for f in found if "Python" in f.what] == [("error", "Python 3.10.2")]
    assert any("its extras are unknown" in f.what for f in found)


def test_a_hard_limit_cannot_be_raised_by_a_command(tmp_path: Path) -> None:
    low = limits(files=1024)
    (soft,) = seen(CLOUD.but(files={"/proc/self/limits": low}), tmp_path / "a", "Limits", "warning", "open files")
    assert soft.command == "ulimit -n 65536"
    hard = CLOUD.but(files={"/proc/self/limits": low.replace("1048576", "1024   ")})
    (finding,) = seen(hard, tmp_path / "b", "Limits", "warning", "open files")
    assert finding.command is None and "administrator" in (finding.fix or "")


def test_a_slow_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 1000, 10))
    monkeypatch.setattr(storage, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    found = CLOUD.findings(tmp_path, write_test=True)["Storage"]
    assert [f.level for f in found] == ["ok", "warning"]
    assert "3.2 MiB/s" in found[1].what


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("27 1 0:5 / / rw - fuse.gcsfuse bucket rw", "fuse.gcsfuse (network)"),
        ("27 1 8:1 / / rw - xfs /dev/sda1 rw", "xfs on an SSD"),
        ("27 1 254:0 / / rw - ext4 /dev/vda rw", "ext4 on a virtual disk"),
        ("27 1 9:9 / / rw - ext4 /dev/mapper/x rw", "ext4, speed class n/a"),
        ("27 1 0:5 / / rw - overlay overlay rw\n28 27 0:6 / /scratch rw - nfs4 nas:/w rw", "nfs4 (network)"),
        ("27 1 0:5 / / rw - overlay overlay rw\n28 27 0:6 / /wo rw - nfs4 nas:/w rw", "overlay, speed class n/a"),
    ],
)
def test_kinds_of_disks(line: str, shown: str, tmp_path: Path) -> None:
    queues = {"/sys/dev/block/8:1/../queue/rotational": "0", "/sys/dev/block/254:0/queue/rotational": "1"}
    machine = CLOUD.but(
        files={"/proc/self/mountinfo": line, "/sys/dev/block/8:1/size": "1", "/scratch/x": "", **queues}
    )
    (finding,) = machine.findings(tmp_path)["Storage"]
    assert finding.what.endswith(f"free, {shown}")


@pytest.mark.parametrize(
    ("speed", "level", "what"),
    [(4.0, "ok", "4.0 x the speed"), (0.5, "note", "0.5 x the speed"), (0.0, "note", "is emulated")],
)
def test_how_fast_bf16_is(speed: float, level: str, what: str, tmp_path: Path) -> None:
    """Instructions for it are no promise: it may have half the speed of fp32."""
    cloud, measured = CLOUD.machine(tmp_path), "measured on one core"
    found = [finding for finding in examine_processor(cloud, lambda: speed) if finding.where == measured]
    assert [finding.level for finding in found] == [level] and what in found[0].what
    assert found[0].command == (None if level == "ok" else "train.precision=fp32")
    assert all(finding.where != measured for finding in examine_processor(cloud))


@pytest.mark.parametrize(("rate", "level", "words"), [
    (2.99e10, "ok", "AdamW updates in host memory move 29.9 GB/s with all cores; kept for headway plan"),
    (None, "warning", "AdamW updates in host memory could not be measured"),
])  # fmt: skip
def test_updates_in_host_memory_are_reported(rate: float | None, level: str, words: str, tmp_path: Path) -> None:
    laptop = LAPTOP.machine(tmp_path)
    assert [(f.level, f.what) for f in examine_memory(laptop, lambda: rate)][-1] == (level, words)
    assert not any("AdamW" in f.what for f in examine_memory(laptop))
