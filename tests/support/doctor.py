"""Recorded machines: small trees of files and outputs of commands for `headway doctor`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from headway.core.machine.system import Machine, Output, Space
from headway.lab.doctor.examine import Examination
from headway.lab.doctor.findings import Finding
from headway.lab.doctor.software import Software, TorchFacts

GIB = 2**30

REQUIREMENTS = (
    "torch<2.14,>=2.11",
    'pyarrow>=15; extra == "parquet"',
    'adlfs>=2024.4; extra == "azure"',
    'headway[remote]; extra == "azure"',
    'pytest>=8; extra == "dev"',
)

CPU_TORCH = TorchFacts("2.12.0+cpu", None)
CUDA_TORCH = TorchFacts("2.12.0+cu130", "13.0", "2.29.3", ("sm_80", "sm_90", "sm_100", "compute_120"), True)

XEON_FLAGS = "fpu sse avx avx2 avx512f avx512_bf16 amx_tile amx_bf16 amx_int8"

LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max processes             {processes}          {processes}          processes
Max open files            {files}              1048576              files
Max core file size        0                    unlimited            bytes
Max locked memory         {locked}            {locked}            bytes
"""

MEMINFO = """MemTotal:       {total} kB
MemFree:        {available} kB
MemAvailable:   {available} kB
SwapTotal:      {swap} kB
SwapFree:       {swap_free} kB
"""


@dataclass(frozen=True)
class Recorded:
    """A machine in a dict."""

    files: Mapping[str, str]
    """By path; a path that ends with a slash is an empty folder."""
    commands: Mapping[str, Output] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    spaces: Mapping[str, Space] = field(default_factory=dict)
    """By mount point."""
    torch: TorchFacts | None = CPU_TORCH
    installed: tuple[str, ...] = ("pyarrow",)

    def but(
        self,
        files: Mapping[str, str | None] | None = None,
        commands: Mapping[str, Output] | None = None,
        environment: Mapping[str, str] | None = None,
        spaces: Mapping[str, Space] | None = None,
    ) -> Recorded:
        """The same with some things different; files that become None are not there."""
        changed = {path: text for path, text in {**self.files, **(files or {})}.items() if text is not None}
        return replace(
            self,
            files=changed,
            commands={**self.commands, **(commands or {})},
            environment={**self.environment, **(environment or {})},
            spaces={**self.spaces, **(spaces or {})},
        )

    def machine(self, folder: Path) -> Machine:
        """Unpacked below a folder."""
        for path, text in self.files.items():
            place = folder / path.lstrip("/")
            if path.endswith("/"):
                place.mkdir(parents=True, exist_ok=True)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(text + "\n", encoding="utf-8")

        def run(arguments: Sequence[str]) -> Output:
            return self.commands.get(" ".join(arguments), Output("missing"))

        def space(path: Path) -> Space:
            points = [point for point in self.spaces if path.is_relative_to(point)]
            if not points:
                raise FileNotFoundError(path)
            return self.spaces[max(points, key=len)]

        return Machine(folder, run, self.environment, space)

    def software(self) -> Software:
        """What is installed there."""
        versions = dict.fromkeys(self.installed, "1.0")
        return Software((3, 11, 7), self.torch, versions.get, REQUIREMENTS)

    def examination(self, folder: Path, **options: object) -> Examination:
        """Ready to be examined."""
        defaults = {"folders": {"runs": Path("/scratch/runs")}, "software": self.software()}
        return Examination(machine=self.machine(folder), **{**defaults, **options})  # type: ignore[arg-type]

    def findings(self, folder: Path, **options: object) -> dict[str, list[Finding]]:
        """What is found, by subject."""
        return {item.subject: list(item.findings) for item in self.examination(folder, **options).examine()}


def interface(
    name: str, *, speed: int | None = None, mtu: int = 1500, up: bool = True, real: bool = True
) -> dict[str, str]:
    """Files of a network interface; a speed of None cannot be read, as with virtual ones."""
    folder = f"/sys/class/net/{name}"
    files = {f"{folder}/operstate": "up" if up else "down", f"{folder}/mtu": str(mtu), f"{folder}/type": "1"}
    if speed is not None:
        files[f"{folder}/speed"] = str(speed)
    if real:
        files[f"{folder}/device/vendor"] = "0x15b3"
    return files


def routes(default: str, *others: str) -> str:
    """/proc/net/route: an address behind each name."""
    lines = ["Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask", f"{default}\t00000000\t0100000A\t0003"]
    lines += [f"{name}\t0000000A\t00000000\t0001" for name in (default, *others)]
    return "\n".join(lines)


def rdma(device: str, *, layer: str = "InfiniBand", rate: int = 400, state: str = "4: ACTIVE") -> dict[str, str]:
    """Files of a device with one port."""
    folder = f"/sys/class/infiniband/{device}/ports/1"
    files = {f"{folder}/link_layer": layer, f"{folder}/rate": f"{rate} Gb/sec (4X NDR)", f"{folder}/state": state}
    gid = "fe80:0000:0000:0000:0000:0000:0000:0001"
    kinds = {0: (gid, "IB/RoCE v1"), 1: (gid, "RoCE v2")}
    if layer == "Ethernet":
        gid = "0000:0000:0000:0000:0000:ffff:0a00:0001"
        kinds |= {2: (gid, "IB/RoCE v1"), 3: (gid, "RoCE v2")}
    for index, (text, kind) in kinds.items():
        files |= {f"{folder}/gids/{index}": text, f"{folder}/gid_attrs/types/{index}": kind}
    return files


def cpuinfo(processors: int, *, sockets: int = 1, threads: int = 1, model: str, flags: str) -> str:
    """/proc/cpuinfo of a machine whose hyper-threads are numbered after all cores."""
    cores = processors // threads
    entries = [
        f"processor\t: {n}\nmodel name\t: {model}\nphysical id\t: {n % cores // (cores // sockets)}\n"
        f"core id\t\t: {n % (cores // sockets)}\nflags\t\t: {flags}"
        for n in range(processors)
    ]
    return "\n\n".join(entries)


def gpu_xml(name: str, memory_mib: int, extra: str = "", **changed: str) -> str:
    """One GPU of `nvidia-smi -q -x`, healthy unless changed."""
    values = {
        "persistence_mode": "Enabled", "current_mig": "Disabled", "current_ecc": "Enabled", "sram_uncorrectable": "0",
        "hw_thermal_slowdown": "Not Active", "pending": "No", "failure": "No", "width": "16x", "state": "N/A",
        "status": "N/A", **changed,
    }  # fmt: skip
    return f"""<gpu><product_name>{name}</product_name><persistence_mode>{values["persistence_mode"]}</persistence_mode>
<mig_mode><current_mig>{values["current_mig"]}</current_mig></mig_mode>
<ecc_mode><current_ecc>{values["current_ecc"]}</current_ecc></ecc_mode>
<ecc_errors><volatile><sram_uncorrectable>{values["sram_uncorrectable"]}</sram_uncorrectable>
<dram_uncorrectable>0</dram_uncorrectable></volatile></ecc_errors>
<remapped_rows><remapped_row_pending>{values["pending"]}</remapped_row_pending>
<remapped_row_failure>{values["failure"]}</remapped_row_failure></remapped_rows>
<clocks_event_reasons><clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
<clocks_event_reason_hw_thermal_slowdown>{values["hw_thermal_slowdown"]}</clocks_event_reason_hw_thermal_slowdown>
</clocks_event_reasons>
<pci><pci_gpu_link_info><link_widths><max_link_width>16x</max_link_width>
<current_link_width>{values["width"]}</current_link_width></link_widths></pci_gpu_link_info></pci>
<fabric><state>{values["state"]}</state><status>{values["status"]}</status></fabric>
<fb_memory_usage><total>{memory_mib} MiB</total></fb_memory_usage><processes>{extra}</processes></gpu>"""


def smi_xml(gpus: Sequence[str], *, driver: str = "580.82.07", cuda: str = "13.0") -> Output:
    """The whole answer."""
    head = '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n'
    versions = f"<driver_version>{driver}</driver_version><cuda_version>{cuda}</cuda_version>"
    return Output("ok", f"{head}<nvidia_smi_log>{versions}{''.join(gpus)}</nvidia_smi_log>")


def topology(gpus: int, nics: int, *, link: str, near: str = "PIX", far: str = "SYS") -> Output:
    """`nvidia-smi topo -m`: GPU n is next to card n."""
    names = [f"GPU{n}" for n in range(gpus)] + [f"NIC{n}" for n in range(nics)]
    rows = ["\t\x1b[4m" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m"]
    for row, name in enumerate(names):
        cells = []
        for column in range(len(names)):
            is_pair = row < gpus and column < gpus
            same = row % gpus == column % gpus
            cells.append(" X " if row == column else link if is_pair else near if same else far)
        rows.append("\t".join([name, *cells, *(("0-55", "0", "N/A") if name.startswith("GPU") else ())]))
    legend = "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect\n"
    return Output("ok", "\n".join(rows) + "\n" + legend)


QUERY, CAPABILITY, TOPOLOGY = (
    "nvidia-smi -q -x",
    "nvidia-smi --query-gpu=compute_cap --format=csv,noheader",
    "nvidia-smi topo -m",
)

_ROOT_DISK = "27 1 259:1 / / rw,relatime - ext4 /dev/nvme0n1p1 rw"

#: A healthy HGX H100: eight GPUs, eight InfiniBand cards of 400 Gb/s, one for storage of 100 Gb/s.
H100 = Recorded(
    files={
        **{k: v for n in range(8) for k, v in rdma(f"mlx5_{n}").items()},
        **rdma("mlx5_8", rate=100),
        **{f"/dev/infiniband/uverbs{n}": "" for n in range(9)},
        **interface("bond0", speed=50_000, mtu=9000, real=False),
        "/sys/class/net/bond0/bonding/mode": "802.3ad 4",
        **interface("eno1", speed=1000),
        **interface("docker0", speed=10_000, real=False),
        "/sys/class/net/bonding_masters": "bond0",
        "/sys/class/net/lo/operstate": "unknown",
        "/proc/net/route": routes("bond0", "docker0", "eno1"),
        "/sys/module/nvidia_peermem/": "",
        "/proc/sys/kernel/osrelease": "5.15.0-113-generic",
        "/proc/cpuinfo": cpuinfo(224, sockets=2, threads=2, model="Intel(R) Xeon(R) Platinum 8480C", flags=XEON_FLAGS),
        "/sys/devices/system/cpu/online": "0-223",
        "/sys/devices/system/cpu/smt/active": "1",
        "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance",
        "/sys/devices/system/cpu/cpu0/cpufreq/scaling_driver": "intel_pstate",
        "/sys/devices/system/node/node0/": "",
        "/sys/devices/system/node/node1/": "",
        "/proc/self/status": "Name:\tpython\nCpus_allowed_list:\t0-223",
        "/proc/self/cgroup": "0::/user.slice/user-1000.slice",
        "/sys/fs/cgroup/user.slice/cpu.max": "max 100000",
        "/sys/fs/cgroup/user.slice/memory.max": "max",
        "/proc/meminfo": MEMINFO.format(total=2113552384, available=2050000000, swap=0, swap_free=0),
        "/proc/self/mountinfo": f"{_ROOT_DISK}\n30 27 0:40 / /scratch rw,noatime - lustre 10.0.0.1@tcp:/scratch rw",
        "/proc/self/limits": LIMITS.format(processes="unlimited", files=1048576, locked="unlimited"),
        "/scratch/runs/": "",
    },
    commands={
        QUERY: smi_xml([gpu_xml("NVIDIA H100 80GB HBM3", 81559, state="Completed", status="Success")] * 8),
        CAPABILITY: Output("ok", "9.0\n" * 8),
        TOPOLOGY: topology(8, 9, link="NV18"),
        "chronyc -n tracking": Output(
            "ok", "Stratum         : 2\nSystem time     : 0.000012 seconds fast of NTP time\nLeap status     : Normal"
        ),
    },
    spaces={
        "/": Space(900 * GIB, 700 * GIB),
        "/scratch": Space(500_000 * GIB, 90_000 * GIB),
        "/dev/shm": Space(1007 * GIB, 1000 * GIB),
    },
    torch=CUDA_TORCH,
)

#: A cloud machine with two PCIe GPUs and 100 Gb/s Ethernet without RDMA.
CLOUD = Recorded(
    files={
        **interface("ens5", speed=100_000, mtu=9001),
        **interface("ens6", speed=25_000, up=False),
        "/proc/net/route": routes("ens5", "ens6"),
        "/proc/sys/kernel/osrelease": "6.8.0-1021-aws",
        "/proc/cpuinfo": cpuinfo(16, model="AMD EPYC 7R13 Processor", flags="avx avx2"),
        "/sys/devices/system/cpu/online": "0-15",
        "/proc/self/status": "Cpus_allowed_list:\t0-15",
        "/proc/self/cgroup": "0::/",
        "/proc/meminfo": MEMINFO.format(total=65_000_000, available=60_000_000, swap=0, swap_free=0),
        "/proc/self/mountinfo": _ROOT_DISK,
        "/proc/self/limits": LIMITS.format(processes=250_000, files=65_536, locked=8_388_608),
    },
    commands={
        QUERY: smi_xml([gpu_xml("NVIDIA A10G", 23028)] * 2),
        CAPABILITY: Output("ok", "8.6\n8.6\n"),
        TOPOLOGY: topology(2, 0, link="PHB"),
        "timedatectl show --property=NTPSynchronized --value": Output("ok", "yes\n"),
    },
    spaces={"/": Space(200 * GIB, 150 * GIB), "/dev/shm": Space(31 * GIB, 31 * GIB)},
    torch=CUDA_TORCH,
)

#: A laptop on its battery, without a GPU of use here.
LAPTOP = Recorded(
    files={
        **interface("wlan0"),
        **interface("enp2s0", speed=1000, up=False),
        "/proc/net/route": routes("wlan0"),
        "/proc/cpuinfo": cpuinfo(8, threads=2, model="Intel(R) Core(TM) i5-8250U CPU @ 1.60GHz", flags="avx avx2"),
        "/sys/devices/system/cpu/online": "0-7",
        "/sys/devices/system/cpu/smt/active": "1",
        "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave",
        "/sys/devices/system/cpu/cpu0/cpufreq/scaling_driver": "intel_pstate",
        "/proc/self/status": "Cpus_allowed_list:\t0-7",
        "/proc/self/cgroup": "0::/user.slice",
        "/proc/meminfo": MEMINFO.format(total=16_000_000, available=900_000, swap=2_000_000, swap_free=200_000),
        "/proc/self/mountinfo": "27 1 8:2 / / rw - ext4 /dev/sda2 rw\n28 27 0:50 / /scratch/runs rw - tmpfs tmpfs rw",
        "/sys/dev/block/8:2/../queue/rotational": "1",
        "/proc/self/limits": LIMITS.format(processes=62_000, files=1024, locked=8_388_608),
        "/scratch/runs/": "",
    },
    spaces={
        "/": Space(200 * GIB, 12 * GIB),
        "/scratch/runs": Space(8 * GIB, 7 * GIB),
        "/dev/shm": Space(8 * GIB, 8 * GIB),
    },
)

#: A container: 2 of 64 cores, 8 of 256 GiB, Docker's 64 MiB of shared memory, a virtual cable as its network.
CONTAINER = Recorded(
    files={
        **interface("eth0", speed=10_000, real=False),
        "/proc/net/route": routes("eth0"),
        "/proc/cpuinfo": cpuinfo(64, sockets=2, model="INTEL(R) XEON(R) GOLD 6548Y+", flags=XEON_FLAGS),
        "/sys/devices/system/cpu/online": "0-63",
        "/proc/self/status": "Cpus_allowed_list:\t0-63",
        "/proc/self/cgroup": "0::/",
        "/sys/fs/cgroup/cpu.max": "200000 100000",
        "/sys/fs/cgroup/memory.max": str(8 * GIB),
        "/sys/fs/cgroup/memory.current": str(3 * GIB),
        "/proc/meminfo": MEMINFO.format(total=268_435_456, available=200_000_000, swap=0, swap_free=0),
        "/proc/self/mountinfo": "600 500 0:99 / / rw - overlay overlay rw\n601 600 0:98 / /data ro - nfs4 nas:/data rw",
        "/proc/self/limits": LIMITS.format(processes="unlimited", files=1_048_576, locked=8_388_608),
        "/data/": "",
    },
    spaces={"/": Space(100 * GIB, 60 * GIB), "/data": Space(9000 * GIB, 90 * GIB), "/dev/shm": Space(2**26, 2**26)},
)

MACHINES = {"h100": H100, "cloud": CLOUD, "laptop": LAPTOP, "container": CONTAINER}
