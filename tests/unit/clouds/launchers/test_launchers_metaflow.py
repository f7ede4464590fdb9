"""Flows of Metaflow: what the steps call, what is tried again, and what is refused; the flow runs without Metaflow."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from headway.clouds.launchers import metaflow
from headway.clouds.launchers.launcher import find_launcher
from headway.config import dump_config
from headway.core.errors import ConfigError
from headway.core.process.table import process_state
from headway.core.process.waiting import wait_until
from support.launchers import Programs, job
from support.waits import LONG

LAUNCHER = find_launcher("metaflow")
ARGO = ("launch.metaflow={where: argo, datastore: s3}", "launch.kubernetes.memory=64Gi", "launch.kubernetes.cpus=8")


@pytest.fixture
def flow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """Load the flow of a job in the place of Metaflow, which keeps how each step is decorated and which one follows."""
    decorated: dict[str, dict[str, Any]] = {}

    def decorator(name: str) -> Callable[..., Any]:
        def with_options(function: Any = None, **options: Any) -> Any:
            if function is not None:
                return function

            def decorate(step: Any) -> Any:
                decorated.setdefault(step.__name__, {})[name] = options
                return step

            return decorate

        return with_options

    class FlowSpec:
        def next(self, step: Any, num_parallel: int | None = None) -> None:
            self.follows, self.num_parallel = step, num_parallel

    names = {name: decorator(name) for name in ("step", "retry", "card", "kubernetes", "parallel")}
    current = SimpleNamespace(retry_count=0, origin_run_id=None, run_id="17")
    module = ModuleType("metaflow")
    module.__dict__.update(FlowSpec=FlowSpec, current=current, **names)
    monkeypatch.setitem(sys.modules, "metaflow", module)
    monkeypatch.chdir(tmp_path)

    monkeypatch.setenv("PATH", os.environ["PATH"])  # the flow changes it

    def load(*overrides: str, machines: int = 1) -> SimpleNamespace:
        space: dict[str, Any] = {"__name__": "flow"}
        exec(compile(LAUNCHER.files(job(*overrides, machines=machines))["flow.py"], "flow.py", "exec"), space)
        return SimpleNamespace(**space, decorated=decorated, now=current)

    return load


def walk(flow: Any) -> tuple[Any, list[str]]:
    """Run all steps, each after the one that names it; returns the flow and their names."""
    one, names = flow(), list[str]()
    one.follows = one.start
    while (step := one.follows) is not None:
        one.follows = None
        names.append(step.__name__)
        step()
    return one, names


@pytest.fixture
def headway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    programs = Programs(tmp_path, monkeypatch, "headway")
    programs.answer("eval", stdout='{"loss": 2.5}\n')
    # `headway report` writes the file that it is asked for.
    (programs.folder / "headway").write_text(
        (programs.folder / "headway")
        .read_text()
        .replace("given =", "'report' in words and open(words[-1], 'w')\ngiven =")
    )
    monkeypatch.setattr(sys, "executable", os.path.realpath("/proc/self/exe"))  # no `headway` beside it
    return programs


def test_the_steps_prepare_train_evaluate_and_export_with_the_config_of_the_launch(
    flow: Callable[..., Any], headway: Programs
) -> None:
    loaded = flow("runs=runs")
    done, steps = walk(loaded.TinyRun)
    assert steps == ["start", "prepare", "train", "evaluate", "export", "end"]
    called = [[word for word in words[1:] if not word.startswith("/tmp")] for words in headway.calls]
    run = "runs/tiny-run"
    assert called == [
        ["data", "prepare"], ["train"], ["report", run, "--output"], ["eval", run, "--json"],
        ["export", run, f"{run}/export"],
    ]  # fmt: skip
    assert dump_config(job("runs=runs", machines=1).config) == loaded.CONFIG
    assert done.evaluation == {"loss": 2.5} and done.exported == f"{run}/export" and done.html == ""
    assert loaded.decorated["train"]["retry"] == {"times": 4, "minutes_between_retries": 1}
    assert loaded.decorated["train"]["card"] == {"type": "html"} and "kubernetes" not in loaded.decorated["train"]


@pytest.mark.parametrize(
    ("name", "flow_name"),
    [("none", "RunNone"), ("path", "RunPath"), ("flow-spec", "RunFlowSpec"), ("runtime-error", "RunRuntimeError")],
)
def test_the_flow_of_any_name_runs(name: str, flow_name: str, flow: Callable[..., Any], headway: Programs) -> None:
    _, steps = walk(getattr(flow("runs=runs", f"name='{name}'"), flow_name))
    assert steps[-1] == "end"


def test_a_store_that_is_fetched_is_not_prepared_and_without_held_out_text_nothing_is_evaluated(
    flow: Callable[..., Any], headway: Programs
) -> None:
    walk(flow("runs=runs", "data.remote=s3://bucket/store", "data.validation=0").TinyRun)
    assert [words[1] for words in headway.calls] == ["train", "report", "export"]


@pytest.mark.parametrize(("code", "error"), [(75, RuntimeError), (1, RuntimeError), (5, SystemExit), (7, SystemExit)])
def test_75_is_tried_again_and_a_final_code_is_not(
    code: int, error: type[BaseException], flow: Callable[..., Any], headway: Programs
) -> None:
    headway.answer("train", code=code)
    with pytest.raises(error) as raised:
        walk(flow("runs=runs").TinyRun)
    if isinstance(raised.value, SystemExit):
        assert raised.value.code == 202  # METAFLOW_EXIT_DISALLOW_RETRY
    else:
        assert f"exit code {code}" in str(raised.value)


def test_a_second_try_waits_for_the_training_that_the_first_has_left(
    flow: Callable[..., Any], headway: Programs, tmp_path: Path
) -> None:
    loaded = flow("runs=runs")
    owner = tmp_path / "runs" / "tiny-run" / ".owner"
    owner.parent.mkdir(parents=True)
    owner.touch()
    loaded.now.retry_count = 1
    one = loaded.TinyRun()
    with owner.open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        trains = threading.Thread(target=one.train, daemon=True)
        trains.start()
        trains.join(0.5)
        assert trains.is_alive() and not headway.calls
    trains.join(LONG)
    assert [words[1] for words in headway.calls] == ["train", "report"]


@pytest.mark.parametrize("number", [0, 1])
def test_each_machine_of_a_parallel_step_knows_its_place_and_the_first_makes_the_report(
    number: int, flow: Callable[..., Any], headway: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = flow("runs=runs", "parallel.workers=2", machines=4)
    loaded.now.parallel = SimpleNamespace(main_ip="10.0.0.7", num_nodes=4, node_index=number)
    loaded.now.retry_count = number
    program = headway.folder / "headway"
    written = program.read_text()
    program.write_text(written.replace("given =", "open('given', 'w').write(json.dumps({**os.environ}))\ngiven ="))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3,2,1,0")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")  # in every pod of a JobSet
    one = loaded.TinyRun()
    one.prepare()
    assert (one.follows.__name__, one.num_parallel) == ("train", 4)
    loaded.headway("train", also=loaded.place())
    found = json.loads((tmp_path / "given").read_text())
    assert {name: text for name, text in found.items() if name.startswith("HEADWAY_")}.items() >= {
        "HEADWAY_MACHINES": "4:4", "HEADWAY_NODE": str(number), "HEADWAY_LEAD": "10.0.0.7",
        "HEADWAY_GANG": f"17.{number}",
    }.items()  # fmt: skip
    assert found["CUDA_VISIBLE_DEVICES"] == ("7,6", "5,4")[number] and "JOB_COMPLETION_INDEX" not in found
    one.train()
    assert ("report" in [words[1] for words in headway.calls]) == (number == 0)
    one.run_directory = "runs/tiny-run"
    one.evaluate([one])
    assert one.evaluation == {"loss": 2.5} and "CUDA_VISIBLE_DEVICES" not in flow(*ARGO, machines=4).place()


def test_a_step_has_all_its_machines_and_this_machine_gpus_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (problem,) = LAUNCHER.problems(job(machines=4, min_machines=2))
    assert "all its machines (num_parallel) or none, not 2:4" in problem.what and "--machines 4" in problem.fix
    Programs(tmp_path, monkeypatch, "python", "kubectl")
    many = job("parallel.workers=2", machines=4)
    for devices in (0, 8):
        monkeypatch.setattr(metaflow, "nvidia_devices", lambda machine, found=devices: found)
        LAUNCHER.check(many)
    monkeypatch.setattr(metaflow, "nvidia_devices", lambda machine: 4)
    with pytest.raises(ConfigError, match="processes of this one, which has 4 GPUs and not 8"):
        LAUNCHER.check(many)
    LAUNCHER.check(job("parallel.workers=2", "train.device=cpu", machines=4))
    LAUNCHER.check(job(*ARGO, machines=4))


def test_without_a_headway_beside_metaflow_the_one_that_launched_runs(
    flow: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, argo = flow(), flow(*ARGO)
    assert not argo.LAUNCHED_BY and here.LAUNCHED_BY[0] == sys.executable
    monkeypatch.setattr(sys, "executable", os.path.realpath("/proc/self/exe"))  # no `headway` beside it
    monkeypatch.setenv("PATH", "")
    assert "python -m headway" in here.headway("--help", output=subprocess.PIPE)
    with pytest.raises(RuntimeError, match=r"install Headway [0-9.]+ there, from its folder or its wheel"):
        argo.headway("--help", output=subprocess.PIPE)


def test_a_training_is_told_when_its_step_dies(flow: Callable[..., Any], tmp_path: Path) -> None:
    script = tmp_path / "step.py"
    script.write_text(
        f"import os, subprocess, sys\nwords = {flow().DIES_WITH_PARENT!r}\n"
        "child = subprocess.Popen([sys.executable, '-c', words, str(os.getpid()), '/bin/sleep', '600'])\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as step:
        assert step.stdout is not None
        trains = int(step.stdout.readline())
        named = Path(f"/proc/{trains}/comm")
        assert wait_until(lambda: named.read_text().strip() == "sleep", LONG)
        step.send_signal(signal.SIGKILL)
    assert wait_until(lambda: not named.exists() or "Z" in Path(f"/proc/{trains}/stat").read_text().split()[2], LONG)


def test_on_argo_each_step_is_a_pod_with_the_volumes_and_the_step_that_trains_has_the_gpus(
    flow: Callable[..., Any],
) -> None:
    more = ["launch.kubernetes.node_selector={pool: h100}", "launch.kubernetes.tolerations=[{key: gpu}]"]
    patch = "launch.metaflow.patch={train: {qos: Guaranteed, memory: null}}"
    loaded = flow(*ARGO, *more, "launch.kubernetes.shared_memory=16Gi", patch)
    pods = {step: options["kubernetes"] for step, options in loaded.decorated.items()}
    assert set(pods) == {"start", "prepare", "train", "evaluate", "export", "end"}
    assert all(pod["persistent_volume_claims"] == {"runs": "/runs", "data": "/data"} for pod in pods.values())
    assert {step: pod.get("gpu") for step, pod in pods.items() if "gpu" in pod} == {"train": 8, "evaluate": 1}
    train = pods["train"]
    assert train["tolerations"] == [{"key": "gpu", "operator": "Exists"}] and train["node_selector"] == {"pool": "h100"}
    assert (train["shared_memory"], train["qos"], train["cpu"]) == (16384, "Guaranteed", 8) and "memory" not in train
    assert pods["prepare"]["memory"] == 68719  # 64 GiB in MB
    assert (Path("/runs/tiny-run"), "/workspace") == (loaded.RUN, loaded.WORKDIR)


@pytest.mark.parametrize(
    ("overrides", "machines", "words"),
    [
        (["name='1'"], 1, "makes no name of a flow"),
        (["launch.metaflow.patch={trian: {}}"], 1, "no step trian"),
        ([*ARGO, "launch.image=null"], 1, "needs an image"),
        ([*ARGO, "name=Tiny_Run"], 1, "cannot name the objects"),
        ([*ARGO, "runs=/elsewhere", "checkpoint.remote.url=s3://bucket/runs"], 1, "each step is a pod of its own"),
        ([*ARGO, "data.store=/elsewhere"], 1, "on no volume that all machines mount"),
        ([*ARGO, "launch.kubernetes.priority_class=high"], 1, "cannot have launch.kubernetes.priority_class"),
        ([*ARGO, "launch.kubernetes.memory=lots"], 1, "'lots' is no amount"),
    ],
)
def test_what_a_flow_cannot_do_is_refused(overrides: list[str], machines: int, words: str) -> None:
    problems = [problem.what for problem in LAUNCHER.problems(job(*overrides, machines=machines))]
    assert any(words in text for text in problems), problems


def test_a_complete_flow_is_not_refused() -> None:
    assert not any(list(LAUNCHER.problems(job(*more, machines=n))) for more in ((), ARGO) for n in (1, 4))


def test_metaflow_and_argo_are_asked_for_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = Programs(tmp_path, monkeypatch, "python", "kubectl")
    LAUNCHER.check(job(*ARGO, machines=1))
    programs.answer("workflowtemplates.argoproj.io", code=1, stderr="Error (NotFound)")
    with pytest.raises(ConfigError, match="does not know the kind WorkflowTemplate") as error:
        LAUNCHER.check(job(*ARGO, machines=1))
    assert "argo-workflows" in error.value.fix
    programs.answer("workflowtemplates.argoproj.io")
    programs.answer("jobsets.jobset.x-k8s.io", code=1, stderr="Error (NotFound)")
    LAUNCHER.check(job(*ARGO, machines=1))
    with pytest.raises(ConfigError, match="does not know the kind JobSet") as error:
        LAUNCHER.check(job(*ARGO, machines=2))
    assert error.value.where == "--machines"
    programs.answer("get-contexts", stdout="one\n")
    with pytest.raises(ConfigError, match="no context 'two'"):
        LAUNCHER.check(job(*ARGO, "launch.kubernetes.context=two", machines=1))
    programs.answer("import metaflow", code=1)
    with pytest.raises(ConfigError, match="python has no Metaflow"):
        LAUNCHER.check(job(machines=1))


#: Stands for a flow: notes its words, and writes the file with the run's number.
_PYTHON = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/python.calls"
while [ $# -gt 0 ]; do [ "$1" = --run-id-file ] && echo "$NUMBER" > "$2"; shift; done
exec sleep "${LASTS:-0}"
"""


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Programs, Path]:
    programs = Programs(tmp_path, monkeypatch, "python", "kubectl")
    (programs.folder / "python").write_text(_PYTHON)
    return programs, programs.folder / "python.calls"


def test_a_flow_is_deployed_to_argo_triggered_looked_at_and_ended(
    python: tuple[Programs, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, calls = python
    monkeypatch.setenv("NUMBER", "argo-tiny-run-x1")
    templates = [{"name": "dag"}, {"name": "train", "retryStrategy": {"retryPolicy": "Always", "limit": 4}}]
    programs.answer("get", "tiny-run", stdout=json.dumps({"spec": {"templates": templates}}))
    handle = LAUNCHER.submit(job(*ARGO, machines=1), tmp_path)
    patched = next(words for words in programs.calls if "patch" in words)
    assert {"workflowtemplates.argoproj.io", "tiny-run", "--type=json"} <= {*patched}
    (operation,) = json.loads(patched[-1].removeprefix("--patch="))
    assert operation["path"] == "/spec/templates/1/retryStrategy/expression"
    assert operation["value"] == "asInt(lastRetry.exitCode) != 202", "a final code, as the flow says it"
    made, triggered = calls.read_text().splitlines()
    flow = f"{tmp_path}/flow.py --no-pylint --datastore=s3 argo-workflows --name tiny-run"
    assert made == f"{flow} create" and triggered.startswith(f"{flow} trigger --run-id-file ")
    assert handle.id == "argo-tiny-run-x1"
    for phase, state in (("Running", "running"), ("Succeeded", "finished"), ("Error", "failed")):
        programs.answer("get", stdout=json.dumps({"status": {"phase": phase, "message": "m"}}))
        assert (LAUNCHER.status(handle).state, LAUNCHER.status(handle).engine) == (state, f"{phase} m")
    programs.answer("get", stdout="")
    assert LAUNCHER.status(handle).state == "gone"
    assert LAUNCHER.logs(handle, follow=True) == 0
    assert "workflows.argoproj.io/workflow=tiny-run-x1" in programs.calls[-1] and "--follow" in programs.calls[-1]
    assert "--container=main" in programs.calls[-1]
    assert LAUNCHER.logs(replace(handle, machines="2"), follow=False) == 0
    assert "--all-containers" in programs.calls[-1]
    LAUNCHER.cancel(handle)
    assert calls.read_text().splitlines()[-1] == f"{flow} terminate argo-tiny-run-x1"


def test_a_local_flow_runs_on_after_the_launch_and_is_ended_by_a_cancel(
    python: tuple[Programs, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBER", "17")
    handle = LAUNCHER.submit(job(machines=1), tmp_path)
    assert handle.id == "17" and python[1].read_text().startswith(f"{tmp_path}/flow.py --no-pylint run --run-id-file")
    assert wait_until(lambda: LAUNCHER.status(handle).state == "finished", LONG)
    (tmp_path / "flow.exit-code").write_text("1\n")
    assert LAUNCHER.status(handle).state == "failed"
    (tmp_path / "flow.exit-code").unlink()
    assert LAUNCHER.status(handle).state == "gone"  # its number may be another process's by now
    program = (
        "import pathlib, signal, sys, time; signal.signal(signal.SIGINT, lambda *_: sys.exit(0));"
        " pathlib.Path(sys.argv[2]).touch(); time.sleep(600)"
    )
    listens = tmp_path / "listens"  # before that, what started in the background ignores the signal
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "flow.py"), str(listens)]) as lives:
        (tmp_path / "flow.pid").write_text(f"{lives.pid}\n")
        assert wait_until(lambda: LAUNCHER.status(handle).state == "running", LONG)
        assert wait_until(listens.exists, LONG)
        LAUNCHER.cancel(handle)
        assert LAUNCHER.status(handle).state == "gone"


def test_what_reads_the_output_of_a_launch_does_not_wait_for_the_flow(
    python: tuple[Programs, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBER", "17")
    monkeypatch.setenv("LASTS", "600")
    reads, writes = os.pipe()
    before = os.dup(1)
    os.dup2(writes, 1)
    try:
        handle = LAUNCHER.submit(job(machines=1), tmp_path)
    finally:
        os.dup2(before, 1)
        os.close(before)
        os.close(writes)
    assert os.read(reads, 1) == b""  # closed, although the flow runs
    os.close(reads)
    os.kill(int((tmp_path / "flow.pid").read_text()), signal.SIGKILL)
    assert wait_until(lambda: LAUNCHER.status(handle).state == "failed", LONG)


def test_a_flow_that_does_not_start_says_why(python: tuple[Programs, Path], tmp_path: Path) -> None:
    (python[0].folder / "python").write_text("#!/bin/sh\necho 'no such option' >&2; exit 2\n")
    with pytest.raises(ConfigError, match="has not started: no such option"):
        LAUNCHER.submit(job(machines=1), tmp_path)


def test_a_flow_that_has_not_started_in_time_is_ended(
    python: tuple[Programs, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metaflow, "_START_SECONDS", 1.0)
    (python[0].folder / "python").write_text("#!/bin/sh\nsleep 600\n")
    with pytest.raises(ConfigError, match="has not started: it says nothing"):
        LAUNCHER.submit(job(machines=1), tmp_path)
    left = process_state(int((tmp_path / "flow.pid").read_text()))
    assert left is None or left.state == "Z"  # nobody may have asked for its exit status yet
