"""What is read out of profiles, counters and computed rows, against numbers worked out by hand."""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.config import Config, LaneGrid, ModelConfig, resolve
from headway.core.machine.system import Machine
from headway.lab.bench import meter as metering
from headway.lab.bench.energy import open_counter, open_gpu_utilization
from headway.lab.bench.meter import Meter, communication_shares, host_to_device
from headway.lab.bench.synthetic import SyntheticFeed
from support.waits import LONG


def event(name: str, start: float, end: float, *, is_async: bool = False, device: str = "CPU") -> Any:
    kinds = torch._C._autograd.DeviceType
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start, end=end),
        is_async=is_async,
        device_type=getattr(kinds, device),
        is_user_annotation=False,
    )


def test_communication_on_the_cpu_is_split_by_what_is_computed_meanwhile() -> None:
    events = [
        event("aten::mm", 0, 40),
        event("aten::matmul", 0, 41),
        event("gloo:all_reduce", 30, 60, is_async=True),
        event("gloo:all_gather", 55, 70, is_async=True),
        event("c10d::allreduce_", 41, 45),  # hands over, and computes nothing
        event("aten::add", 90, 100),
    ]
    # Under way from 30 to 70, of which 30 to 41 something was computed; from 0 to 100 in all.
    assert communication_shares(events, "cpu") == pytest.approx((0.29, 0.11))
    assert communication_shares(events[:1], "cpu") is None


def test_compiled_code_computes_but_while_it_waits_for_collectives_of_its_own() -> None:
    events = [
        event("## Call CompiledFxGraph fa3 ##", 0, 80),
        event("aten::mm", 0, 10),
        event("gloo:all_reduce", 20, 60, is_async=True),
        event("_c10d_functional::wait_tensor", 50, 60),
        event("CompiledFunctionBackward", 80, 100),  # Python around it, which computes nothing of its own
        event("aten::add", 90, 100),
    ]
    # Under way from 20 to 60, of which the last quarter was waited.
    assert communication_shares(events, "cpu") == pytest.approx((0.1, 0.3))


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="there is no C++ compiler")
def test_pytorch_says_when_compiled_code_is_at_work() -> None:
    """By a name that it promises to nobody."""
    compiled = torch.compile(lambda x: (x * 2 + 1).relu().sum())
    x = torch.ones(2**20, requires_grad=True)
    compiled(x).backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        compiled(x).backward()
    calls = [one for one in profiler.events() if metering._kind_on_cpu(one) == "computed"]
    assert len([one for one in calls if one.name.startswith(metering._COMPILED)]) == 2, "forward and backward"


def test_communication_on_gpus_is_what_kernels_of_nccl_do() -> None:
    events = [
        event("aten::mm", 0, 500),  # on the host, which waits for nobody
        event("ampere_sgemm", 0, 60, device="CUDA"),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 50, 80, device="CUDA"),
        event("multi_tensor_apply_kernel", 80, 100, device="CUDA"),
    ]
    assert communication_shares(events, "cuda") == pytest.approx((0.2, 0.1))


def test_processors_count_joules_and_begin_anew(tmp_path: Path) -> None:
    zone = tmp_path / "sys/class/powercap/intel-rapl:0"
    part, board = (tmp_path / "sys/class/powercap" / name for name in ("intel-rapl:0:0", "intel-rapl:1"))
    for folder, name, joules in ((zone, "package-0", 9_000_000), (part, "core", 5), (board, "psys", 7)):
        folder.mkdir(parents=True)
        (folder / "name").write_text(f"{name}\n")
        (folder / "max_energy_range_uj").write_text("10000000\n")
        (folder / "energy_uj").write_text(f"{joules}\n")
    machine = Machine(tmp_path)
    counter = open_counter("cpu", 0, True, machine)
    assert counter is not None
    (zone / "energy_uj").write_text("9500000\n")
    (board / "energy_uj").write_text("1500000\n")
    assert counter.joules() == 0.5, "the board's counter has the package's joules in it"
    (zone / "energy_uj").write_text("1500000\n")
    assert counter.joules() == 2.0
    assert open_counter("cpu", 0, False, machine) is None, "one worker of a machine speaks for it"
    (zone / "energy_uj").unlink()
    assert open_counter("cpu", 0, True, machine) is None


def test_gpus_count_joules_under_their_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = [5_000, 7_500, 7_600]  # millijoules
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda name: f"handle of {name}",
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: {"handle of GPU-1234-3": counted.pop}[handle](0),
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"1234-{index}"))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    counter = open_counter("cuda", 3, False)
    assert counter is not None and "GPU" in counter.source
    assert [counter.joules(), counter.joules()] == pytest.approx([2.5, 0.1])
    assert open_counter("cuda", 4, True) is None, "one that does not count, and processors do not stand for it"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_counter("cuda", 3, True) is None


def test_the_use_of_a_gpu_is_sampled_until_its_driver_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    percents, refused = [80, 70, 90], threading.Event()

    def rates(handle: str) -> Any:
        if not percents:
            refused.set()
            raise RuntimeError("not supported, as of a part of a GPU")
        return SimpleNamespace(gpu=percents.pop())

    nvml = SimpleNamespace(
        nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=str, nvmlDeviceGetUtilizationRates=rates
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="1234"))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert open_gpu_utilization("cpu", 0) is None
    for expected in ([0.9, 0.7, 0.8], []):
        found = open_gpu_utilization("cuda", 0)
        assert found is not None
        found.every_seconds = 0.001
        found.start()
        assert refused.wait(LONG)
        assert found.stop() == expected
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_gpu_utilization("cuda", 0) is None


def test_joules_of_gpus_are_known_when_those_of_all_workers_are() -> None:
    from headway.lab.bench.measure import _energy

    gpus: Any = SimpleNamespace(energy_source="the driver of the GPUs (NVML)")
    processors: Any = SimpleNamespace(energy_source="the processors (RAPL)")
    assert _energy(gpus, [2.0, 3.0]).joules == 5 and _energy(gpus, [2.0, None]) is None  # type: ignore[union-attr]
    assert _energy(processors, [2.0, None]).joules == 2, "one worker of a machine reads them"  # type: ignore[union-attr]
    assert _energy(SimpleNamespace(energy_source=None), [None]) is None  # type: ignore[arg-type]


def test_copies_to_a_gpu_are_timed_to_their_end_and_the_fastest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is made up: it queues a copy, and does it when somebody waits."""
    now, seconds, queued = 0.0, [0.5, 0.02, 0.01, 0.03, 0.04], list[float]()

    def wait(device: torch.device) -> None:
        nonlocal now
        now += sum(queued)
        queued.clear()

    def copy(source: None, non_blocking: bool) -> None:
        queued.append(seconds.pop(0))

    fake = SimpleNamespace(
        uint8=torch.uint8,
        empty=lambda size, dtype, pin_memory: None,
        empty_like=lambda source, device: SimpleNamespace(copy_=copy),
    )
    monkeypatch.setattr(metering, "torch", fake)
    monkeypatch.setattr(metering, "synchronize", wait)
    monkeypatch.setattr(metering, "time", SimpleNamespace(perf_counter=lambda: now))
    assert host_to_device(torch.device("cuda")) == pytest.approx(2**28 / 0.01 / 1e9) and not seconds
    assert host_to_device(torch.device("cpu")) is None


def test_rows_are_the_same_for_every_number_of_workers() -> None:
    def rows(grid: LaneGrid) -> torch.Tensor:
        feed = SyntheticFeed(3, 100, 8, grid)
        return torch.cat([batch["ids"] for lane in range(grid.lanes) for batch in feed.batch(5, lane)])

    whole = rows(LaneGrid(1, 1, 8))
    assert whole.shape == (8, 8) and whole.min() >= 0 and whole.max() < 100
    assert torch.equal(whole, rows(LaneGrid(2, 2, 2))) and torch.equal(whole, rows(LaneGrid(4, 1, 2)))
    batch = SyntheticFeed(3, 100, 8, LaneGrid(1, 1, 8)).batch(5, 0)[0]
    assert torch.equal(batch["ids"][:, 1:], batch["targets"][:, :-1])
    other = SyntheticFeed(3, 100, 8, LaneGrid(1, 1, 8)).batch(6, 0)[0]["ids"]
    assert not torch.equal(whole, other)
    many = SyntheticFeed(3, 1000, 4096, LaneGrid(1, 1, 1)).batch(0, 0)[0]["ids"]
    assert (many < 125).float().mean() == pytest.approx(0.5, abs=0.03), "the cube of an even distribution"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells peaks of resident memory")
def test_the_peak_of_resident_memory_begins_anew() -> None:
    """In a process of its own: in this one there may be memory that was freed and kept."""
    script = (
        "import torch\n"
        "from headway.lab.bench.meter import begin_memory, memory_peaks\n"
        "large = torch.ones(64 * 2**20)\n"  # 256 MiB
        "del large\n"
        "before = begin_memory()\n"
        "again = torch.ones(16 * 2**20)\n"
        "print(before and memory_peaks(torch.device('cpu'))['resident'] - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if done.stdout.strip() == "None":
        pytest.skip("this container does not let a process forget its peak")
    assert 60 * 2**20 < int(done.stdout) < 100 * 2**20, done.stderr


def test_the_peak_of_tensors_is_what_is_there_and_what_a_step_adds() -> None:
    from headway.lab.bench.meter import Allocations, highest, live_bytes

    assert highest([5, 3, -8, 7]) == 8 and highest([-4, 2]) == 0
    gc.collect()  # or what other tests have left goes in the middle of this one
    there = live_bytes()
    kept = torch.ones(2**20)
    view = kept[: 2**10]
    assert live_bytes() - there == 4 * 2**20, "memory that two tensors share counts once"
    watch = Allocations()
    watch.start()
    one = torch.ones(3 * 2**18)  # 3 MiB
    two = one + one
    del one
    three = two + 1.0
    del two, three
    peak = watch.stop()
    assert view.numel() and 0 <= peak - live_bytes() - 2 * 3 * 2**20 < 2**16


def test_measured_steps_without_an_update_are_counted() -> None:
    cursor = SimpleNamespace(skipped_steps=0)
    world = SimpleNamespace(device=torch.device("cpu"), local_rank=1, size=1)
    job: Any = SimpleNamespace(world=world, state=SimpleNamespace(cursor=cursor))
    meter = Meter(warmup_steps=1, steps=2, profiled_steps=1)
    meter.on_start(job)
    for step, skipped in ((1, 1), (2, 2), (3, 2)):
        cursor.skipped_steps = skipped
        meter.on_step(job, step, {"train/items": 4.0, "train/loss": 2.0})
    assert meter.skipped_steps == 1 and meter.mean_loss == 2.0 and meter.items == 8


def test_what_is_computed_again_counts_attention_as_the_model_does() -> None:
    from headway.lab.bench.measure import _hfu
    from headway.models.facts import flops_per_token, part_costs

    model = ModelConfig(preset="1m", vocab_size=512)
    values = {"model": {"preset": "1m", "vocab_size": 512}, "train": {"steps": 1, "sequence_length": 64}}
    config = resolve(Config.model_validate(values))
    config = config.model_copy(update={"train": config.train.model_copy(update={"activation_checkpointing": "full"})})
    task: Any = SimpleNamespace(model=SimpleNamespace(config=model))
    whole, documents = flops_per_token(model, 64), flops_per_token(model, 16)
    layers = sum(part_costs(model, 64).layers)
    assert _hfu(config, task, whole, 0.5) == pytest.approx(0.5 * (whole + layers / 3) / whole)
    short = sum(part_costs(model, 16).layers)
    assert _hfu(config, task, documents, 0.5) == pytest.approx(0.5 * (documents + short / 3) / documents)
