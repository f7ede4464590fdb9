"""The order of measurements, what is not repeated, and what becomes of those that do not come out."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.core.errors import ConfigError, HeadwayError, Preempted
from headway.core.process.command import module_command
from headway.core.process.table import DEAD, process_state
from headway.lab.bench import runner
from headway.lab.bench.blocks import block
from headway.lab.bench.collect import collect
from headway.lab.bench.launchers import launch_command, lead_file, run_command
from headway.lab.bench.results import CELLS, CellResult, Status, read_results
from headway.lab.bench.runner import DISCARDED, EARLIER, LOGS, MeasureOptions, open_matrix, run_matrix, stoppable, to_do
from headway.lab.bench.spec import Spec
from headway.lab.bench.suite import Suite, load_suite
from support.bench import measurement

SUITE = "strategy: [ddp, zero1]\nworkers: 2\nmodel: 1m\nsequence_length: 32\nrepeats: 2\n"

MISSING_ONLY = MeasureOptions()


class Workers:
    """Stands for the processes of a cell: notes what was measured, and answers as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.measured: list[str] = []
        self.faults: list[str] = []
        self.answer: Callable[[Spec], tuple[int | None, str]] = lambda spec: (0, told(spec, "ok"))
        monkeypatch.setattr(runner, "run_command", self._run)
        monkeypatch.setattr(runner, "describe_environment", lambda launcher: {"machine": self.machine})
        self.machine = "one"

    def _run(self, command: list[str], environment: dict[str, str], log: Any, seconds: float) -> int | None:
        spec = Spec.read(Path(command[-1]))
        self.measured.append(f"{spec.result.cell.strategy}.{spec.result.repeats[0].number}")
        self.faults.append(environment["HEADWAY_FAULTS"])
        code, text = self.answer(spec)
        log.write(f"first line\n{text}\nlast line\n".encode())
        return code


def told(spec: Spec, status: Status, reason: str | None = None, speed: float = 100.0) -> str:
    found = measurement(speed, spec.result.cell.workers) if status == "ok" else None
    return block(spec.ended(status, reason, found).model_dump(mode="json"))


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    return Workers(monkeypatch)


@pytest.fixture
def suite(tmp_path: Path) -> Callable[..., Suite]:
    (tmp_path / "own.yaml").write_text(SUITE)
    return lambda *overrides: load_suite(str(tmp_path / "own.yaml"), overrides)


def run(suite: Suite, folder: Path, measure_options: MeasureOptions = MISSING_ONLY) -> dict[str, CellResult]:
    results = run_matrix(open_matrix(suite, folder, measure_options=measure_options))
    return {result.cell.strategy: result for result in results}


def test_cells_take_turns_and_a_stopped_matrix_goes_on(
    workers: Workers, suite: Callable[..., Suite], tmp_path: Path
) -> None:
    def stop_at_third(spec: Spec) -> tuple[int, str]:
        if len(workers.measured) == 3:
            raise KeyboardInterrupt
        return 0, told(spec, "ok")

    workers.answer = stop_at_third
    with pytest.raises(KeyboardInterrupt):
        run(suite(), tmp_path / "out")
    assert workers.measured == ["ddp.1", "zero1.1", "ddp.2"]
    assert {path.suffix for path in (tmp_path / "out" / LOGS).iterdir()} == {".log"}, "nothing else is left"
    assert [len(result.repeats) for result in read_results(tmp_path / "out")] == [1, 1]
    workers.answer = lambda spec: (0, told(spec, "ok"))
    workers.measured.clear()
    results = run(suite(), tmp_path / "out")
    assert workers.measured == ["ddp.2", "zero1.2"]
    assert all(result.status == "ok" and len(result.measured) == 2 for result in results.values())
    workers.measured.clear()
    run(suite(), tmp_path / "out")
    assert workers.measured == []
    run(suite("repeats=3"), tmp_path / "out")
    assert workers.measured == ["ddp.3", "zero1.3"], "more repeats are added to those that are there"
    run(suite(), tmp_path / "out", MeasureOptions(again=True))
    assert len(workers.measured) == 2 + 4


@pytest.mark.slow
def test_another_machine_measures_anew_and_the_first_ones_results_come_back(
    workers: Workers, suite: Callable[..., Suite], tmp_path: Path
) -> None:
    run(suite(), tmp_path)
    run(suite("workers=1"), tmp_path)
    assert len(list((tmp_path / CELLS).iterdir())) == 4, "other cells of the same conditions stay"
    workers.machine = "two"
    workers.measured.clear()
    run(suite(), tmp_path)
    assert len(workers.measured) == 4
    assert {r.environment["machine"] for r in read_results(tmp_path)} == {"two"}
    assert len(list((tmp_path / EARLIER).glob("*.json"))) == 4
    assert [len(list((tmp_path / below).iterdir())) for below in (LOGS, f"{EARLIER}/{LOGS}")] == [4, 8]
    collect([str(tmp_path)], tmp_path / "collected")
    assert read_results(tmp_path / "collected") == read_results(tmp_path), "what is put aside is not reported either"
    workers.machine = "one"
    workers.measured.clear()
    run(suite(), tmp_path)
    assert workers.measured == []
    assert {r.environment["machine"] for r in read_results(tmp_path)} == {"one"}


def test_strong_cells_of_another_largest_number_of_workers_have_other_rows_and_are_put_aside(
    workers: Workers, suite: Callable[..., Suite], tmp_path: Path
) -> None:
    run(suite("strategy=ddp", "workers=1,2,4", "scaling=strong"), tmp_path)
    run(suite("strategy=ddp", "workers=2"), tmp_path)
    assert len(read_results(tmp_path)) == 4, "weak cells beside strong ones"
    run(suite("strategy=ddp", "workers=1,2", "scaling=strong"), tmp_path)
    found = {(r.cell.scaling, r.cell.workers): r.settings["rows_for_workers"] for r in read_results(tmp_path)}
    assert found == {("weak", 2): None, ("strong", 1): 2, ("strong", 2): 2}
    run(suite("strategy=zero1", "workers=2", "seed=1"), tmp_path)
    assert {r.cell.strategy for r in read_results(tmp_path)} == {"zero1"}, "other rows of data too"


@pytest.mark.parametrize(
    ("code", "log", "status", "reason"),
    [
        (None, "", "timeout", "not done after 900 s"),
        (-9, "", "killed", "ended with signal 9"),
        (3, "", "failed", "ended with exit code 3"),
        (1, "failed: worker 1: RuntimeError: first\nfailed: lost a peer", "failed", "worker 1: RuntimeError: first"),
        (1, "failed: lost a peer\nout_of_memory: worker 0: too large", "out_of_memory", "worker 0: too large"),
        (1, "failed: lost a peer\nkilled: worker 1 died (signal 9)", "killed", "worker 1 died (signal 9)"),
        (
            1,
            "failed: lost a peer\n  rank      : 0 (local_rank: 0)\n  exitcode  : -15 (pid: 16)  (SIGTERM)\n"
            "  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 17)  (SIGKILL)",
            "killed",
            "worker 1 died (signal 9)",
        ),
    ],
)
def test_what_does_not_come_out_is_a_result_with_its_reason(
    workers: Workers, suite: Callable[..., Suite], tmp_path: Path, code: int | None, log: str, status: str, reason: str
) -> None:
    def answer(spec: Spec) -> tuple[int | None, str]:
        if spec.result.cell.strategy == "ddp":
            return 0, told(spec, "ok")
        lines = []
        for line in log.splitlines():
            kind, _, why = line.partition(": ")
            known = kind in ("failed", "killed", "out_of_memory")
            lines.append(told(spec, kind, why) if known else line)  # type: ignore[arg-type]
        return code, "\n".join(lines)

    workers.answer = answer
    results = run(suite(), tmp_path)
    bad = results["zero1"]
    assert results["ddp"].status == "ok" and len(results["ddp"].measured) == 2
    assert bad.status == status and bad.last_failure is not None
    assert bad.last_failure.reason == reason.removeprefix("failed: ")
    assert bad.last_failure.log_tail[-1] == "last line" and "HEADWAY-BENCH" not in str(bad.last_failure.log_tail)
    rest = [] if status == "out_of_memory" else ["zero1.2"]
    assert workers.measured == ["ddp.1", "zero1.1", "ddp.2", *rest], "a second repeat would not fit either"
    collect([str(tmp_path / LOGS)], tmp_path / "collected")
    assert read_results(tmp_path / "collected") == read_results(tmp_path), "logs alone say all of it"
    workers.answer = lambda spec: (0, told(spec, "ok"))
    assert run(suite(), tmp_path)["zero1"].status == status, "a failure is a result too"
    assert run(suite(), tmp_path, MeasureOptions(failed_again=True))["zero1"].status == "ok"


def test_retries_try_again_but_not_what_is_refused(
    workers: Workers, suite: Callable[..., Suite], tmp_path: Path
) -> None:
    attempts: dict[str, int] = {}

    def answer(spec: Spec) -> tuple[int, str]:
        name = spec.result.cell.strategy
        attempts[name] = attempts.get(name, 0) + 1
        if name == "zero1":
            return 2, told(spec, "refused", "no such thing here")
        return (1, "") if attempts[name] < 3 else (0, told(spec, "ok"))

    workers.answer = answer
    results = run(suite("retries=2", "repeats=1", "faults=[{strategy: ddp, order: kill@step=1}]"), tmp_path)
    assert results["ddp"].status == "ok" and results["ddp"].repeats[0].attempts == 3 and attempts["zero1"] == 1
    assert results["zero1"].status == "refused"
    assert workers.faults == ["kill@step=1"] * 3 + [""]


def test_a_refusal_stays_one_where_a_launcher_lets_the_other_machines_wait(
    workers: Workers, suite: Callable[..., Suite], tmp_path: Path
) -> None:
    workers.answer = lambda spec: (None, told(spec, "refused", "no such address"))
    results = run(suite("retries=2", "repeats=1"), tmp_path)
    assert {(r.status, r.repeats[0].reason) for r in results.values()} == {("refused", "no such address")}
    assert len(workers.measured) == 2, "another attempt would meet the same error"


def test_an_attempt_begins_without_the_address_that_one_which_was_killed_has_left(
    workers: Workers, suite: Callable[..., Suite], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def command(launcher: str, spec: Path, *numbers: int) -> list[str]:
        lead_file(spec).write_text("192.0.2.7")
        return [launcher, str(spec)]

    def start(command: list[str], *arguments: Any) -> int:
        seen.append(lead_file(Path(command[-1])).exists())
        return 1

    monkeypatch.chdir(tmp_path)  # the launcher is checked with a file of the working folder
    monkeypatch.setattr(runner, "launch_command", command)
    monkeypatch.setattr(runner, "run_command", start)
    run(suite("repeats=1"), tmp_path)
    assert seen == [False, False]


def test_a_result_of_another_cell_in_the_log_counts_for_nothing(
    workers: Workers, suite: Callable[..., Suite], tmp_path: Path
) -> None:
    kept: list[str] = []

    def answer(spec: Spec) -> tuple[int, str]:
        kept.append(told(spec, "ok"))
        return 1, kept[0] if len(kept) > 1 else ""

    workers.answer = answer
    assert {r.status for r in run(suite("repeats=1"), tmp_path).values()} == {"failed"}


@pytest.mark.slow
def test_nothing_of_a_cell_that_takes_too_long_is_left_running(tmp_path: Path) -> None:
    # The child leads a session of its own, as workers of an agent do, and does not mind SIGTERM.
    script = (
        "import os, signal, subprocess, sys, time\n"
        "child = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)'\n"
        "p = subprocess.Popen([sys.executable, '-c', child], start_new_session=True)\n"
        "open('pid', 'w').write(str(p.pid)); time.sleep(3600)\n"
    )
    command = [sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r})\n{script}"]
    with (tmp_path / "log").open("wb") as log:
        assert run_command(command, {"PATH": "/bin"}, log, 20.0) is None
    pid = int((tmp_path / "pid").read_text())
    state = process_state(pid)
    assert state is None or state.state == DEAD


def test_nothing_is_left_running_that_was_being_started_when_a_signal_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with (tmp_path / "log").open("wb") as log, pytest.raises(Preempted, match="SIGTERM"), stoppable(MISSING_ONLY):
        run_command(command, {}, log, 600.0)
    assert started[0].poll() == -signal.SIGKILL


def test_two_processes_do_not_measure_into_one_folder(
    workers: Workers, suite: Callable[..., Suite], tmp_path: Path
) -> None:
    import fcntl

    (tmp_path / LOGS).mkdir()
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(HeadwayError, match="another process"):
            run(suite(), tmp_path)
    assert to_do(open_matrix(suite(), tmp_path)), "nothing was measured"


def test_a_process_that_is_a_worker_of_somebody_elses_is_refused(
    suite: Callable[..., Suite], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    open_matrix(suite(), tmp_path)  # alone it says nothing: see `headway.core.coordination.launched`
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="already one of 4"):
        open_matrix(suite(), tmp_path)


def test_launchers() -> None:
    spec = Path("spec.json")
    assert launch_command("local", spec, 2) == module_command("headway.lab.bench.local", "spec.json")
    worker = module_command("headway.lab.bench.worker", "spec.json")
    assert launch_command("torchrun", spec, 4)[-len(worker) - 3 :] == ["--nproc-per-node", "4", "--no-python", *worker]
    assert launch_command("srun --ntasks={workers} --exclusive", spec, 4) == [
        *("srun", "--ntasks=4", "--exclusive", sys.executable, "-P", "-m", "headway.lab.bench.worker", "spec.json")
    ]
    with pytest.raises(ConfigError, match="how many workers"):
        launch_command("srun", spec, 4)
    with pytest.raises(ConfigError, match="No closing quotation"):
        launch_command("srun --comment='a --ntasks={workers}", spec, 4)


def test_what_is_measured_anew_does_not_come_back_when_that_is_stopped(
    workers: Workers, suite: Callable[..., Suite], tmp_path: Path
) -> None:
    run(suite("repeats=1"), tmp_path)
    workers.machine = "two"  # puts the first aside
    run(suite("repeats=1"), tmp_path)
    workers.machine = "one"

    def stop_at_second(spec: Spec) -> tuple[int, str]:
        if len(workers.measured) == 2:
            raise KeyboardInterrupt
        return 0, told(spec, "ok")

    workers.answer = stop_at_second
    workers.measured.clear()
    with pytest.raises(KeyboardInterrupt):
        run(suite(), tmp_path, MeasureOptions(again=True))
    workers.answer = lambda spec: (0, told(spec, "ok"))
    workers.measured.clear()
    begun = time.time()
    results = run(suite(), tmp_path)
    assert workers.measured == ["zero1.1", "ddp.2", "zero1.2"], "what was measured anew stays, and nothing of before"
    assert results["zero1"].repeats[0].started >= begun - 0.01
    assert [len(list((tmp_path / below).glob("*.json"))) for below in (DISCARDED, EARLIER)] == [2, 2]


def test_failures_that_are_measured_anew_do_not_come_back(
    workers: Workers, suite: Callable[..., Suite], tmp_path: Path
) -> None:
    workers.answer = lambda spec: (3, "") if spec.result.cell.strategy == "ddp" else (0, told(spec, "ok"))
    run(suite(), tmp_path)

    def stop(spec: Spec) -> tuple[int, str]:
        raise KeyboardInterrupt

    workers.answer = stop
    with pytest.raises(KeyboardInterrupt):
        run(suite(), tmp_path, MeasureOptions(failed_again=True))
    assert [cell.cell.strategy for _, cell in to_do(open_matrix(suite(), tmp_path))] == ["ddp", "ddp"]


def test_what_is_measured_anew_is_not_collected_with_what_is_new(
    workers: Workers, suite: Callable[..., Suite], tmp_path: Path
) -> None:
    one_cell = suite("strategy=ddp", "repeats=3")
    run(one_cell, tmp_path / "out")
    workers.measured.clear()

    def stop_at_second(spec: Spec) -> tuple[int, str]:
        if len(workers.measured) == 2:
            raise KeyboardInterrupt
        return 0, told(spec, "ok", speed=200.0)

    workers.answer = stop_at_second
    with pytest.raises(KeyboardInterrupt):
        run(one_cell, tmp_path / "out", MeasureOptions(again=True))
    for source, target in ((tmp_path / "out", "folder"), (tmp_path / "out" / LOGS, "logs")):
        collect([str(source)], tmp_path / target)
        (cell,) = read_results(tmp_path / target)
        assert [found.tokens_per_second for found in cell.measured] == [200.0], target
    collect([str(tmp_path / "out" / DISCARDED)], tmp_path / "discarded")
    (cell,) = read_results(tmp_path / "discarded")
    assert len(cell.measured) == 3, "whoever names it gets it"


@pytest.mark.parametrize("flake", [1, 2])
def test_a_repeat_that_does_not_come_out_ends_no_cell_and_is_measured_anew_alone(
    workers: Workers, suite: Callable[..., Suite], tmp_path: Path, flake: int
) -> None:
    one_cell = suite("strategy=ddp", "repeats=3")
    workers.answer = lambda spec: (3, "") if spec.result.repeats[0].number == flake else (0, told(spec, "ok"))
    before = run(one_cell, tmp_path)["ddp"]
    assert [repeat.status == "ok" for repeat in before.repeats] == [number != flake for number in (1, 2, 3)]
    workers.measured.clear()
    run(one_cell, tmp_path)
    assert workers.measured == [], "a failure is a result too"
    workers.answer = lambda spec: (0, told(spec, "ok"))
    after = run(one_cell, tmp_path, MeasureOptions(failed_again=True))["ddp"]
    assert workers.measured == [f"ddp.{flake}"] and len(after.measured) == 3
    assert {repeat.started for repeat in before.repeats if repeat.measured} < {r.started for r in after.repeats}
    (discarded,) = read_results(tmp_path, DISCARDED)
    assert [repeat.number for repeat in discarded.repeats] == [flake]
    assert [path.name.split(".")[1] for path in (tmp_path / DISCARDED / LOGS).iterdir()] == [f"r{flake}"]
    assert len(list((tmp_path / LOGS).iterdir())) == 3
    assert to_do(open_matrix(one_cell, tmp_path)) == []


def test_a_cell_of_which_nothing_came_out_twice_is_given_up(
    workers: Workers, suite: Callable[..., Suite], tmp_path: Path
) -> None:
    workers.answer = lambda spec: (3, "")
    run(suite("strategy=ddp", "repeats=9"), tmp_path)
    assert workers.measured == ["ddp.1", "ddp.2"]


def test_patterns_that_fit_no_cell_are_said(
    suite: Callable[..., Suite], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_matrix(suite("exclude=[{workers: 3, reason: why}]"), tmp_path)
    assert "exclude: no cell has workers 3" in capsys.readouterr().err


def test_variables_that_change_speed_are_part_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.lab.bench.environment import describe_environment

    telling = ["CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_WORKSPACE_CONFIG", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
               "TORCHDYNAMO_DISABLE", "OMP_PROC_BIND", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA",
               "NVIDIA_TF32_OVERRIDE", "LD_PRELOAD"]  # fmt: skip
    silent = ["CUDNN_UNKNOWN", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "TORCHELASTIC_RESTART_COUNT",
              "TORCHELASTIC_RUN_ID", "RANK"]  # fmt: skip
    for name in (*telling, *silent):
        monkeypatch.setenv(name, "")
    found = describe_environment("local")["variables"]
    assert set(telling) <= found.keys() and not found.keys() & set(silent)
