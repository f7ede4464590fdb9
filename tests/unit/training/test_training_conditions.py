"""Disk, clock, memory and GPUs: what is not well is said once, measured, and never in training's way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headway.core.machine.neighbours import Load
from headway.core.machine.system import Machine, Output, Space, host_name
from headway.telemetry.catalogue import metric
from headway.telemetry.system import newest_readings
from headway.training.conditions.clock import ClockJumps
from headway.training.conditions.condition import Reading
from headway.training.conditions.disk import Disk
from headway.training.conditions.gpus import Gpus
from headway.training.conditions.memory import Memory
from headway.training.conditions.processors import Processors
from headway.training.conditions.watch import ConditionWatch, conditions
from support.doctor import gpu_xml, smi_xml

GIB = 2**30


def test_the_disk_is_low_when_the_next_checkpoints_do_not_fit(tmp_path: Path) -> None:
    free = [0]
    disk = Disk(tmp_path / "checkpoints", Machine(space=lambda path: Space(GIB, free[0])))
    assert disk.read() == Reading({"health/disk_free_gib": 0.0}), "how large a checkpoint is, nobody knows yet"
    for step, size in ((1, 10), (2, 1000)):
        (tmp_path / f"checkpoints/step-{step:08d}").mkdir(parents=True)
        (tmp_path / f"checkpoints/step-{step:08d}/shard").write_bytes(bytes(size))
    for bytes_free, fit, said in (
        (5000, 5, ""),
        (1999, 1, "the one after the next"),
        (999, 0, "the next one will not"),
    ):
        free[0] = bytes_free
        reading = disk.read()
        assert reading.metrics["health/checkpoints_that_fit"] == fit
        assert said in reading.warnings.get("disk", "") and bool(reading.warnings) == bool(said)


def test_a_clock_that_is_set_is_told_from_one_that_runs() -> None:
    wall, steady = [1000.0], [5.0]
    clock = ClockJumps(lambda: wall[0], lambda: steady[0])
    wall[0], steady[0] = 1060.2, 65.0
    assert not clock.read().warnings
    wall[0], steady[0] = 1000.2, 125.0
    reading = clock.read()
    assert "back by 120.0 s" in reading.warnings["clock"]
    assert reading.metrics["health/clock_jump_seconds"] == pytest.approx(-120)
    wall[0], steady[0] = 1060.2, 185.0
    assert not clock.read().warnings, "it has been said"


@pytest.mark.parametrize(
    ("available_kib", "used", "warns"), [(8 * 2**20, 1, False), (300_000, 1, True), (8 * 2**20, 3900, True)]
)
def test_memory_is_low_by_the_machine_or_by_a_limit(tmp_path: Path, available_kib: int, used: int, warns: bool) -> None:
    group = tmp_path / "sys/fs/cgroup/job"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 16777216 kB\nMemAvailable: {available_kib} kB\n")
    assert bool(Memory(Machine(root=tmp_path)).read().warnings) == (available_kib == 300_000)
    (group / "memory.max").write_text(str(4096 * 2**20))
    (group / "memory.current").write_text(str(used * 2**20))
    reading = Memory(Machine(root=tmp_path)).read()
    # 300,000 KiB are 7 % of the limit: not little by that.
    assert bool(reading.warnings) == (used == 3900), reading
    assert warns or not reading.warnings
    assert Memory(Machine(root=tmp_path / "none")).read() == Reading()


NVIDIA = """<nvidia_smi_log><gpu><product_name>H100</product_name>
<temperature><gpu_temp>{heat} C</gpu_temp></temperature>
<clocks_event_reasons><clocks_event_reason_hw_thermal_slowdown>{hot}</clocks_event_reason_hw_thermal_slowdown>
</clocks_event_reasons><ecc_errors><volatile><dram_uncorrectable>{errors}</dram_uncorrectable></volatile></ecc_errors>
</gpu></nvidia_smi_log>"""


def test_gpus_are_watched_for_what_is_new() -> None:
    answers = {"nvidia-smi": Output("missing"), "dmesg": Output("failed", "not permitted")}

    def well(heat: int = 60, errors: int = 2, hot: str = "Not Active") -> Output:
        return Output("ok", NVIDIA.format(heat=heat, errors=errors, hot=hot))

    gpus = Gpus(Machine(root=Path("/nowhere"), run=lambda arguments: answers[arguments[0]]))
    assert gpus.read() == Reading(), "there is none"
    answers |= {"nvidia-smi": well(), "dmesg": Output("ok", "NVRM: Xid (PCI:0000:3b:00): 79, pid=1")}
    reading = gpus.read()
    assert not reading.warnings, "what was there before is the doctor's"
    assert reading.metrics == {"health/gpu_temperature_celsius": 60.0}
    answers["nvidia-smi"] = well(heat=93, errors=3, hot="Active")
    answers["dmesg"] = Output("ok", "NVRM: Xid (PCI:0000:3b:00): 79, x\nNVRM: Xid (PCI:0000:3b:00): 48, y")
    said = "\n".join(gpus.read().warnings.values())
    assert "1 uncorrected memory errors since" in said and "at 93 degrees" in said
    assert "Xid 48" in said and "Xid 79" not in said
    answers["nvidia-smi"] = Output("silent")
    assert "no longer answers" in gpus.read().warnings["driver"]


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (Output("failed", "<?xml?>\n\nNo handle for GPU0: GPU is lost\nReboot"), "No handle for GPU0: GPU is lost;"),
        (Output("failed"), "no reason given;"),
        (Output("ok", "<nvidia_smi_log></nvidia_smi_log>"), "no reason given;"),
        (Output("missing"), "no reason given;"),
    ],
)  # fmt: skip
def test_a_gpu_that_falls_off_the_bus_is_told_with_what_the_kernel_says(output: Output, said: str) -> None:
    well = Output("ok", NVIDIA.format(heat=60, errors=0, hot="Not Active"))
    answers = {"nvidia-smi": output, "dmesg": Output("ok", "")}
    gpus = Gpus(Machine(root=Path("/nowhere"), run=lambda arguments: answers[arguments[0]]))
    assert gpus.read() == Reading(), "what was wrong before the run began is the doctor's"
    answers["nvidia-smi"] = well
    assert not gpus.read().warnings
    answers |= {"nvidia-smi": output, "dmesg": Output("ok", "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off")}
    warnings = gpus.read().warnings
    assert said in warnings["driver"]
    assert any("Xid 79 of GPU 0000:3b:00" in text for text in warnings.values())


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (Load(waited=0.0, others=0.0), ""),
        (Load(waited=0.46, others=1.04), "other processes use 1.0 of 2 processors: this run's threads wait 46% of"),
        (Load(waited=0.46, others=0.0), ""),  # too many threads of its own
        (Load(waited=0.46, others=0.2), ""),  # the same, on a desktop
        (Load(waited=0.12, others=0.15), "other processes use 0.1 of 2 processors: this run's threads wait 12% of"),
        (Load(waited=0.02, others=1.9), ""),  # neighbours of low priority
        (Load(stolen=0.25), "other virtual machines took 25% of this one's processors"),
        (Load(throttled=0.4, waited=0.4, others=1.0), "the quota of its control group kept this run"),
    ],
)
def test_neighbours_that_slow_a_run_are_told_with_figures(tmp_path: Path, load: Load, said: str) -> None:
    (tmp_path / "sys/devices/system/cpu").mkdir(parents=True)
    (tmp_path / "sys/devices/system/cpu/online").write_text("0-1")
    now, loads = [0.0], [Load(waited=0.9, others=2.0, seconds=0.1), load, Load(waited=0.0), Load(waited=0.0)]
    processors = Processors(Machine(root=tmp_path), measure=lambda: loads.pop(0), clock=lambda: now[0])
    assert processors.read() == Reading(), "how a run begins says nothing"
    reading = processors.read()
    assert said in reading.warnings.get("processors", "") and bool(reading.warnings) == bool(said)
    assert reading.metrics.get("health/cpu_wait_share") == load.waited
    now[0] = 599.0
    assert bool(processors.read().warnings) == bool(said), "it is the same warning, which is not shown again"
    now[0] = 601.0
    assert not processors.read().warnings


class Says:
    """A condition that reads what it is given."""

    def __init__(self, read: Callable[[], Reading]) -> None:
        self.read = read


def test_what_is_not_well_is_said_once_until_it_is_well_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    now = [Reading({"health/x": 1.0}, {"x": "x is low"})]

    def broken() -> Reading:
        raise ZeroDivisionError("inside")

    watch = ConditionWatch({"broken": Says(broken), "x": Says(lambda: now[0])}, 1.0)
    said = []
    for reading in (now[0], now[0], Reading(), now[0]):
        now[0] = reading
        watch.look()
        said.append(capsys.readouterr().err.count("x is low"))
    assert said == [1, 0, 0, 1]
    metrics: dict[str, float] = {}
    watch.on_step(None, 1, metrics)  # type: ignore[arg-type]
    watch.on_step(None, 2, later := dict[str, float]())  # type: ignore[arg-type]
    assert metrics == {"health/x": 1.0} and later == {}, "a reading belongs to one step"
    watch = ConditionWatch({"broken": Says(broken)}, 1.0)
    watch.look()
    watch.look()
    assert capsys.readouterr().err.count("broken cannot be watched: ZeroDivisionError: inside") == 1
    assert set(conditions(tmp_path)) == {"disk", "clock", "memory", "gpus", "processors"}


def test_each_machine_records_its_readings(tmp_path: Path) -> None:
    """What the driver reports, by GPU; and this machine's processor, memory, disks and network."""
    attempt = tmp_path / "attempts" / "001"
    attempt.mkdir(parents=True)
    report = gpu_xml("NVIDIA H100 80GB HBM3", 81559).replace("<gpu>", '<gpu id="00000000:3B:00.0">').replace(
        "</gpu>",
        "<utilization><gpu_util>97 %</gpu_util></utilization><temperature><gpu_temp>61 C</gpu_temp></temperature>"
        "<gpu_power_readings><instant_power_draw>512.25 W</instant_power_draw>"
        "<current_power_limit>700.00 W</current_power_limit></gpu_power_readings>"
        "<clocks><sm_clock>1980 MHz</sm_clock><mem_clock>2619 MHz</mem_clock></clocks></gpu>",
    ).replace("<total>81559 MiB</total>", "<total>81559 MiB</total><used>40960 MiB</used>")  # fmt: skip
    kernel = ["", "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."]
    machine = Machine(run=lambda words: smi_xml([report]) if words[0] == "nvidia-smi" else Output("ok", kernel[0]))
    watched = conditions(tmp_path / "checkpoints", machine, attempt=attempt)
    for _ in range(2):
        readings = [condition.read() for condition in watched.values()]
        kernel.reverse()
    assert list(watched)[-1] == "system" and not readings[-1].metrics, "they are no step's"
    [path] = attempt.iterdir()
    [found] = newest_readings(attempt).values()
    assert path.name == f"system-{host_name()}.jsonl" and len(path.read_text().splitlines()) == 2
    gpu = {name.removesuffix("/0"): value for name, value in found.items() if name.startswith("gpu/")}
    assert gpu == {
        "gpu/utilization_share": 0.97, "gpu/memory_used_gib": 40.0, "gpu/memory_total_gib": 81559 / 1024,
        "gpu/temperature_celsius": 61.0, "gpu/power_watts": 512.25, "gpu/power_limit_watts": 700.0,
        "gpu/sm_clock_mhz": 1980.0, "gpu/memory_clock_mhz": 2619.0, "gpu/uncorrected_errors": 0.0,
        "gpu/xid_errors": 1.0,
    }  # fmt: skip
    assert found["system/disk_total_gib"] > found["system/disk_free_gib"] > 0
    assert 0 < found["system/memory_used_gib"] < found["system/memory_allowed_gib"]
    assert all(metric(name) is not None for name in found)
