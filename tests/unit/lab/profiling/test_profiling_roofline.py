"""From times to losses, and from losses to advice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from headway.cli.application import application
from headway.config import Config, resolve
from headway.core.coordination.heartbeat import Phase, beat, exchanging, observe
from headway.core.errors import ConfigError
from headway.core.statistics import covered
from headway.lab.profiling import run as profiling_run
from headway.lab.profiling.page import COLOURS, memory_chart, render_page
from headway.lab.profiling.plan import Plan
from headway.lab.profiling.profiler import _iterations_flops
from headway.lab.profiling.record import Ceilings, Memory, Product, Profile, StepTimes, Work, WorkerRecord
from headway.lab.profiling.roofline import Analysis, analyse
from headway.lab.profiling.tables import part_rows, profiler_text, spread_text, warnings
from headway.lab.profiling.tracing import clipped, running_total, thinned
from support.runs import config_values

WORK = Work(forward_flops=2e9, backward_flops=4e9, update_flops=0.0, update_bytes=4e8, norm_bytes=1e8)
CEILINGS = Ceilings(
    products_flops_per_second=1e11, products="fp32 products of 2,048 x 2,048", peak_flops_per_second=None,
    copy_bytes_per_second=1e10, all_reduce=None,
)  # fmt: skip
MEMORY = Memory(
    base_bytes=100, kind="cpu", times=[0.0, 0.1], tensor_bytes=[100, 200], resident_times=[0.0], resident_bytes=[900],
    parts=[("data", 0.0, 0.05), ("forward", 0.05, 0.1)], peak_bytes={"data": 100, "forward": 200},
)  # fmt: skip
PARTS = {"data": 0.01, "forward": 0.1, "backward": 0.2, "reduction": 0.02, "optimizer": 0.06, "host": 0.01}


def worker(rank: int = 0, waiting: float = 0.0, device: str = "cpu", **parts: float) -> WorkerRecord:
    """One whose step takes four tenths of a second."""
    times = {**PARTS, **parts}
    step = StepTimes(seconds=sum(times.values()), parts=times, waiting={"reduction": waiting})
    ceilings = CEILINGS
    if device == "cuda":
        ceilings = CEILINGS.model_copy(update={"peak_flops_per_second": 2e11})
    return WorkerRecord(
        rank=rank, device=device, device_name="NVIDIA H200", threads=1, compiled=False,
        steps=[step, step], traced_steps=[step],
        metered_seconds=0.39, items_per_step=400.0, feed_seconds=0.001, checkpoint_stall_seconds=1.0,
        checkpoint_bytes=100, work=WORK, ceilings=ceilings, operators=[],
        products=[Product(shape="8 x 8 x 8", calls=2, seconds=1e-5, flops=1024, bytes=768)], memory=MEMORY,
        device_idle_share=0.25 if device == "cuda" else None,
    )  # fmt: skip


def config(tmp_path: Path, *, compiled: bool = True, **sections: Any) -> Config:
    train = {"steps": 100, "compile": compiled, **sections.pop("train", {})}
    values = config_values(tmp_path, train=train, **{"checkpoint": {"every": "100 steps"}, **sections})
    return resolve(Config.model_validate(values))


def losses(found: Analysis) -> dict[str, float]:
    return {loss.parts[0]: loss.seconds for loss in found.losses}


def test_what_is_lost_is_the_time_beyond_the_ceiling(tmp_path: Path) -> None:
    found = analyse(config(tmp_path), [worker()])
    # 6 GFLOP at 100 GFLOP/s; 0.1 and 0.4 GB at 10 GB/s; all else need not be. A save of a second in 100 steps.
    expected = {"forward": 0.3 - 0.06, "optimizer": 0.06 - 0.04, "reduction": 0.02 - 0.01, "data": 0.01, "host": 0.01,
                "checkpoint": 0.01}  # fmt: skip
    assert losses(found) == pytest.approx(expected)
    assert found.losses[0].what == (
        "forward and backward run at 20% of the 100 GFLOP/s that fp32 products of 2,048 x 2,048 reach here: up to"
        " 240.0 ms of a step of 410.0 ms (59%) could be saved"
    )
    assert found.reached == pytest.approx(6e9 / 0.41 / 1e11)
    reached = {row.part: row.reached for row in found.rows}
    assert reached["forward"] == pytest.approx(0.2) and reached["data"] is None


@pytest.mark.parametrize(("every", "steps"), [("50 steps", 50), ("12800 tokens", 12800 / (8 * 32)), ("80 s", 200)])
def test_a_save_is_shared_out_over_the_steps_between_two(tmp_path: Path, every: str, steps: float) -> None:
    found = analyse(config(tmp_path, checkpoint={"every": every}), [worker()])
    assert found.rows[-1].part == "checkpoint" and found.rows[-1].slowest_seconds == pytest.approx(1.0 / steps)
    assert sum(row.share for row in found.rows) == pytest.approx(1.0)


def test_the_slowest_worker_is_the_one_that_waits_least(tmp_path: Path) -> None:
    quick, slow = worker(0, reduction=0.12, waiting=0.11), worker(1, data=0.11)
    found = analyse(config(tmp_path), [quick, slow])
    assert found.slowest.rank == 1 and losses(found)["data"] == pytest.approx(0.11)
    means = {row.part: row.mean_seconds for row in found.rows}
    assert means["data"] == pytest.approx(0.06) and means["reduction"] == pytest.approx(0.07)
    on_gpus = [worker(0, reduction=0.12, device="cuda"), worker(1, data=0.11, device="cuda")]
    assert analyse(config(tmp_path), on_gpus).slowest.rank == 1


def test_advice_is_true_of_the_config_and_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def advice(part: str, count: int = 1, **sections: Any) -> list[str]:
        records = [worker(rank, reduction=0.3) for rank in range(count)]
        found = analyse(config(tmp_path, **sections), records)
        return next(loss.advice for loss in found.losses if part in loss.parts)

    monkeypatch.setattr("headway.lab.profiling.advice.cpu_multiplies_bf16", lambda: False)
    monkeypatch.setattr("headway.lab.profiling.advice._has_compiler", lambda: True)
    assert advice("forward", compiled=False) == ["train.compile=true"]
    assert advice("forward") == []
    assert advice("forward", train={"precision": "bf16"}) == ["train.precision=fp32"]
    assert advice("forward", train={"activation_checkpointing": "full"}) == ["train.activation_checkpointing=selective"]
    monkeypatch.setattr("headway.lab.profiling.advice.cpu_multiplies_bf16", lambda: True)
    assert advice("forward") == ["train.precision=bf16"]
    assert advice("forward", train={"precision": "bf16"}) == []
    monkeypatch.setattr("headway.lab.profiling.advice._has_compiler", lambda: False)
    assert advice("forward", compiled=False) == ["train.precision=bf16"]
    assert advice("reduction") == [], "alone there is nobody to sum with"
    two: dict[str, Any] = {"count": 2, "parallel": {"workers": 2}}
    assert advice("reduction", **two) == ["parallel.reduce_precision=bf16", "train.global_batch=16"]
    # Elastic takes no other type of sums, so that is not said although the sums are in fp32.
    assert advice("reduction", determinism="elastic", **two) == ["determinism=run", "train.global_batch=16"]
    assert advice("data") and "checking what else runs" in advice("data")[0]


def profile_of(tmp_path: Path, record: WorkerRecord) -> Profile:
    found = analyse(config(tmp_path), [record])
    return Profile(
        name="run",
        headway="0",
        torch="0",
        created=0.0,
        precision="bf16",
        compiled=True,
        warmup_steps=1,
        workers=[record],
        slowest=0,
        step_seconds=found.step_seconds,
        tokens_per_second=1.0,
        mfu=found.reached,
        reached=found.reached,
        profiler_cost=0.1,
        rows=found.rows,
        losses=found.losses,
        notes=[],
    )


def test_a_page_of_a_gpu_has_its_peak_and_its_idle_time(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, worker(device="cuda"))
    page = render_page(profile)
    assert "MFU" in page and "25.0%" in page and "200 GFLOP/s of an NVIDIA H200" in page
    assert "makes a step 10% longer" in page
    faster = profile.model_copy(update={"profiler_cost": -0.01})
    assert profiler_text(faster) == "makes steps not measurably longer"
    slow = profile.rows[0].model_copy(update={"bytes_per_second": 3e7})
    assert part_rows(profile.model_copy(update={"rows": [slow]}))[0][-1] == "30.0 MB/s"


def of_seconds(*seconds: float) -> WorkerRecord:
    """A worker whose timed steps took so long."""
    steps = [StepTimes(seconds=each, parts={"forward": each}, waiting={}) for each in seconds]
    return worker().model_copy(update={"steps": steps})


def test_how_much_steps_differ_is_said(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, of_seconds(0.043, 0.192, 0.019, 0.016))
    assert spread_text(profile) == "16.0 ms to 192.0 ms, median 31.0 ms"
    assert profile.workers[0].step_seconds == pytest.approx(0.0675), "a mean, as before"
    assert "mean of 4 steps (16.0 ms to 192.0 ms, median 31.0 ms)" in render_page(profile)


def test_a_step_that_pulls_the_mean_up_is_warned_of(
    tmp_path: Path, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    steady, held_up = (profile_of(tmp_path, of_seconds(*times)) for times in ((0.04, 0.05, 0.06), (0.04, 0.05, 0.11)))
    assert warnings(steady) == [] and 'class="warn"' not in render_page(steady)
    (warning,) = warnings(held_up)
    assert warning.startswith("1 of 3 steps took more than twice the median of 50.0 ms, the longest 110.0 ms")
    assert "--steps 30" in warning and warning in render_page(held_up)
    monkeypatch.setattr(profiling_run, "run_profile", lambda *_: held_up)
    app = application(["profile"])
    shown = CliRunner().invoke(app, ["profile", str(tiny())])
    assert f"warning: {warning}" in shown.output and "40.0 ms to 110.0 ms, median 50.0 ms" in shown.output
    told = json.loads(CliRunner().invoke(app, ["profile", str(tiny()), "--json"]).stdout)
    assert told["warnings"] == [warning] and told["spread"]["median"] == 0.05 and told["spread"]["outliers"] == 1


@pytest.mark.parametrize(("resident", "panels"), [(400, 1), (1100, 2)])
def test_memory_has_colours_and_where_needed_a_panel_of_its_own(resident: int, panels: int) -> None:
    chart = memory_chart(MEMORY.model_copy(update={"resident_times": [0.0, 0.1], "resident_bytes": [resident] * 2}))
    variables = [entry.variable for entry in chart.legend]
    assert len(set(variables)) == len(variables) and "--ink" in variables
    parts = {f"--series-{number}" for number in COLOURS.values()}
    memory = [entry.variable for entry in chart.legend if entry.label not in COLOURS]
    assert len(memory) == 3 and not parts & set(memory)
    assert ("resident, MiB" in chart.svg) == (panels == 2)


def test_newton_schulz_flops_are_those_that_pytorch_counts() -> None:
    from torch.optim._muon import _zeropower_via_newtonschulz
    from torch.utils.flop_counter import FlopCounterMode

    for shape in ((32, 48), (48, 32)):
        with FlopCounterMode(display=False) as counter:
            _zeropower_via_newtonschulz(torch.randn(shape), (3.4, -4.7, 2.0), 5, 1e-7)
        assert _iterations_flops(5, *sorted(shape)) == counter.get_total_flops()


def test_curves() -> None:
    curve = running_total([(1.0, 5), (2.0, 10), (3.0, -15)], 100)
    assert curve == [(1.0, 105), (2.0, 115), (3.0, 100)]
    assert clipped(curve, 1.5, 2.5) == [(1.5, 105), (2.0, 115), (2.5, 115)]
    assert clipped(curve, 4.0, 5.0) == [(4.0, 100), (5.0, 100)]
    spike = [(float(i), 1 if i != 777 else 9) for i in range(1000)]
    assert len(thinned(spike, 100)) == 100 and (777.0, 9) in thinned(spike, 100)
    assert covered([(0, 10), (5, 20), (30, 50)], 0, 40) == 30 and covered([], 0, 40) == 0


def test_an_observer_hears_phases_and_waiting_until_there_is_none() -> None:
    heard: list[str] = []

    class Ear:
        def phase(self, phase: Phase) -> None:
            heard.append(phase.name)

        def waits(self, exchange: str) -> None:
            heard.append(exchange)

        def goes_on(self) -> None:
            heard.append("on")

    observe(Ear())
    try:
        beat(Phase.BACKWARD)
        with exchanging("sum"):
            pass
    finally:
        observe(None)
    beat(Phase.UPDATE)
    assert heard == ["BACKWARD", "sum", "on"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "30"], "--steps 3"),
        (["--steps", "2", "--memory-snapshot"], "of GPUs only"),
        (["--steps", "2", "--dry-run"], "3 steps to warm up, 2 timed, 2 traced"),
    ],
)
def test_what_would_not_work_is_said_before_anything_is_trained(
    tiny: Callable[..., Path], tmp_path: Path, arguments: list[str], said: str
) -> None:
    app = application(["profile"])
    result = CliRunner().invoke(app, ["profile", str(tiny()), "-o", str(tmp_path / "out"), *arguments])
    assert said in result.output + str(result.exception)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling_run, "check", lambda config, plan: config)
    (tmp_path / "taken").touch()
    with pytest.raises(ConfigError) as error:
        profiling_run.run_profile(config(tmp_path), Plan(1, 2, 2), tmp_path / "taken")
    assert error.value.where == str(tmp_path / "taken") and "--output" in str(error.value.fix)


def test_a_profile_that_is_too_long_is_told_the_longest_that_fits() -> None:
    def longest(steps: int, timed: int, warmup: int = 3) -> int | None:
        return profiling_run._most_timed(Plan(warmup, timed, min(3, timed)), steps)

    # Warm-up 3, traced 3 (2 of 2), and one that saves.
    assert [longest(steps, 10) for steps in (16, 12, 10, 9, 8, 7)] == [9, 5, 3, 2, 2, None]
    assert longest(5, 10**12) is None and longest(100, 10**12) == 93


def test_ceilings_take_no_more_memory_than_a_container_has_left(tmp_path: Path) -> None:
    from headway.core.machine.system import Machine
    from headway.lab.profiling.ceilings import _free_bytes

    files = {"proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n", "proc/self/cgroup": "0::/job\n",
             "sys/fs/cgroup/job/memory.max": str(8 * 2**30),
             "sys/fs/cgroup/job/memory.current": str(6 * 2**30)}  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    cpu = torch.device("cpu")
    assert _free_bytes(cpu, Machine(tmp_path)) == 2**29 and _free_bytes(cpu, Machine(tmp_path / "no-linux")) > 0
