"""A flow of Metaflow on this machine, whose step that trains is killed and whose export fails; and its Argo export."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.clouds.launchers.launcher import find_launcher
from headway.clouds.launchers.metaflow import stop_at_final_codes
from headway.core.process.waiting import wait_until
from support.launchers import job, read_by_their_models
from support.object_storage import S3Server, SeaweedFs
from support.parts_table import METAFLOW, environment
from support.runs import headway, saved_step, state_hash
from support.waits import LONG

pytestmark = [pytest.mark.parts(METAFLOW), pytest.mark.timeout(1800)]

_READ = """
import json, sys
from metaflow import Flow, namespace
namespace(None)
run = Flow(sys.argv[1]).latest_run
print(json.dumps({
    "evaluation": run["evaluate"].task.data.evaluation, "origin": run.data.evaluation, "ok": run.successful,
    "report": len(run.data.html),
}))
"""


@pytest.fixture
def metaflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The interpreter that has it, with its records in this test's folder."""
    python = environment("metaflow")
    if python is None:
        pytest.skip("there is no Metaflow: tests/parts/install.sh")
    # Records and cards go below the working folder; cards would not follow a datastore elsewhere.
    monkeypatch.setenv("METAFLOW_HOME", str(tmp_path / "metaflow"))
    monkeypatch.setenv("METAFLOW_USER", "tester")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # The flow's steps call the program.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    yield python


def _step_processes(name: str) -> list[int]:
    """The processes of a step of the flow."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text().split("\0")
        except OSError:
            continue
        if any(word.endswith("flow.py") for word in words) and words[-1:] == [""] and "step" in words and name in words:
            found.append(int(path.parent.name))
    return found


#: What the page shows of a launch on several machines.
_SHOWN = (Path(__file__).parents[2] / "docs/launch.md").read_text().partition("--machines 4` makes")[2].split("```")[1]


def _shapes(text: str) -> set[str]:
    """The lines of a log without numbers, names, precision, and what comes at the end of some."""
    lines = (re.sub(r" · (eta|saved) .*", "", line.strip()) for line in text.splitlines())
    named = (re.sub(r"^\w+: |\((.+?)\) has joined|\b(fp32|bf16)\b", "", line) for line in lines)
    return {re.sub(r"[\d.,]+[kM]?", "N", line) for line in named if line}


def _children(process: int) -> list[int]:
    """All processes below a process."""
    found = []
    for task in Path(f"/proc/{process}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *_children(child)]
    return found


def test_a_killed_step_is_tried_again_and_a_failed_flow_is_resumed_to_the_same_state(
    metaflow: Path, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    config, run = tiny(train={"steps": 60}), tmp_path / "runs" / "flown"
    in_the_way = run / "export"
    own = ["name=flown", f"launch.metaflow={{python: {metaflow}, minutes_between_retries: 0, retries: 1}}"]
    # Slow, so that the first try does not end before it is killed.
    launched = headway("launch", config, "--on", "metaflow", "-y", *own, faults="slow@step=1")
    assert launched.returncode == 0, launched.stderr
    log = run / "launch" / "flow.log"
    try:
        assert wait_until(lambda: saved_step(run) > 0, LONG, 0.1), log.read_text()
        (step,) = _step_processes("train")
        os.kill(step, signal.SIGKILL)
        in_the_way.write_text("not a folder\n")
        ended = run / "launch" / "flow.exit-code"
        assert wait_until(ended.exists, LONG, 0.2), log.read_text()
    finally:
        headway("launch", "cancel", run, "-y")
    said = log.read_text()
    assert "Task is starting (retry)" in said and int(ended.read_text()) != 0, said
    attempts = sorted(path.name for path in (run / "attempts").iterdir())
    assert len(attempts) == 2, said
    whole = headway("train", config, "name=whole")
    assert whole.returncode == 0, whole.stderr
    assert state_hash(run) == state_hash(tmp_path / "runs" / "whole")

    in_the_way.unlink()
    resumed = subprocess.run(
        [metaflow, run / "launch" / "flow.py", "--no-pylint", "resume"], capture_output=True, text=True, timeout=LONG
    )
    assert resumed.returncode == 0, resumed.stdout
    assert sorted(path.name for path in (run / "attempts").iterdir()) == attempts  # not trained again
    assert (in_the_way / "model.safetensors").is_file()
    asked = subprocess.run([metaflow, "-c", _READ, "Flown"], capture_output=True, text=True, timeout=LONG)
    assert asked.returncode == 0, asked.stderr
    found = json.loads(asked.stdout.splitlines()[-1])
    assert found["ok"] and found["report"] > 10_000
    # `get_cards` does not find the cards of a step that was resumed; they are files.
    cards = [path for path in tmp_path.glob(".metaflow/mf.cards/**/*.html") if "train" in path.parts]
    assert cards and "<html" in cards[0].read_text(), sorted(tmp_path.glob(".metaflow/mf.cards/**/*"))
    assert found["evaluation"]["step"] == 60 and found["evaluation"]["loss"] > 0


def test_a_node_of_several_machines_is_killed_and_the_state_is_that_of_one_machine(
    metaflow: Path, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    config, run = tiny(train={"steps": 60}, determinism="elastic"), tmp_path / "runs" / "flown"
    own = ["name=flown", f"launch.metaflow={{python: {metaflow}, minutes_between_retries: 0, retries: 4}}"]
    launched = headway("launch", config, "--on", "metaflow", "--machines", 4, "-y", *own, faults="slow@step=1")
    assert launched.returncode == 0, launched.stderr
    log, ended = run / "launch" / "flow.log", run / "launch" / "flow.exit-code"
    try:
        assert wait_until(lambda: saved_step(run) > 0, LONG, 0.1), log.read_text()
        steps = _step_processes("train")
        assert len(steps) == 4
        killed = next(step for step in steps if b"_node_2" in Path(f"/proc/{step}/cmdline").read_bytes())
        for one in (killed, *_children(killed)):  # as the end of its machine
            os.kill(one, signal.SIGKILL)
        assert wait_until(ended.exists, LONG, 0.2), log.read_text()
    finally:
        headway("launch", "cancel", run, "-y")
    said = log.read_text()
    assert ended.read_text().strip() == "0" and "Task is starting (retry)" in said, said
    assert _shapes(_SHOWN) <= _shapes("\n".join(line.partition("] ")[2] for line in said.splitlines())), (
        "as docs/launch.md has it"
    )
    alone = headway("train", config, "name=alone")
    assert alone.returncode == 0, alone.stderr
    assert state_hash(run) == state_hash(tmp_path / "runs" / "alone")
    attempts = [json.loads(path.read_text()) for path in sorted(run.glob("attempts/*/attempt.json"))]
    assert len(attempts) == 2 and all(len(attempt["machines"]) == 4 for attempt in attempts)
    asked = subprocess.run([metaflow, "-c", _READ, "Flown"], capture_output=True, text=True, timeout=LONG)
    assert asked.returncode == 0, asked.stderr
    found = json.loads(asked.stdout.splitlines()[-1])
    assert found["ok"] and found["evaluation"]["step"] == 60 and found["report"] > 10_000
    cards = [path for path in tmp_path.glob(".metaflow/mf.cards/**/*.html") if "train" in path.parts]
    assert any("<svg" in card.read_text() for card in cards), "the report of the first machine"


def _exported(metaflow: Path, s3: S3Server, tmp_path: Path, machines: int) -> dict[str, Any]:
    """The workflow of Argo that Metaflow makes of a launch, changed as the launch does it."""
    settings = "launch.metaflow={where: argo, datastore: s3, retries: 3}"
    given = job(
        settings, "launch.kubernetes.memory=64Gi", "launch.kubernetes.secret_names=[storage]", machines=machines
    )
    (tmp_path / "flow.py").write_text(find_launcher("metaflow").files(given)["flow.py"])
    words = ["--no-pylint", "--datastore=s3", "argo-workflows", "--name=tiny-run", "create", "--only-json"]
    where = {"METAFLOW_DATASTORE_SYSROOT_S3": f"{s3.url}/metaflow", "METAFLOW_S3_ENDPOINT_URL": s3.endpoint}
    done = subprocess.run(
        [metaflow, "flow.py", *words],
        env={**os.environ, **where},
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    workflow: dict[str, Any] = json.loads(done.stdout)
    for operation in stop_at_final_codes(workflow["spec"]["templates"]):
        _, *keys, last = operation["path"].split("/")
        place = workflow
        for key in keys:
            place = place[int(key)] if isinstance(place, list) else place[key]
        place[last] = operation["value"]
    return workflow


@pytest.mark.parametrize("s3_server", [SeaweedFs], indirect=True)
def test_several_machines_are_a_jobset_in_the_workflow_of_argo(metaflow: Path, s3: S3Server, tmp_path: Path) -> None:
    workflow = _exported(metaflow, s3, tmp_path, machines=4)
    assert read_by_their_models([workflow]) == [[]]
    train = next(one for one in workflow["spec"]["templates"] if one["name"] == "train")
    # Argo replaces its own expressions before the manifest is read.
    manifest = train["resource"]["manifest"]
    jobset = yaml.safe_load(re.sub(r"{{=asInt\(inputs.parameters.workerCount\)}}", "3", manifest))
    jobs = {one["name"]: one for one in jobset["spec"]["replicatedJobs"]}
    assert (jobset["kind"], jobs["control"]["replicas"], jobs["worker"]["replicas"]) == ("JobSet", 1, 3)
    for one in jobs.values():
        pod = one["template"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
        assert {"secretRef": {"name": "storage"}} in container["envFrom"]
        assert {"/runs", "/data"} <= {mount["mountPath"] for mount in container["volumeMounts"]}


@pytest.mark.parametrize("s3_server", [SeaweedFs], indirect=True)
def test_the_flow_exports_to_a_workflow_of_argo(metaflow: Path, s3: S3Server, tmp_path: Path) -> None:
    workflow = _exported(metaflow, s3, tmp_path, machines=1)
    assert read_by_their_models([workflow]) == [[]]
    templates = {template["name"]: template for template in workflow["spec"]["templates"]}
    order = [task["name"] for task in templates[workflow["spec"]["entrypoint"]]["dag"]["tasks"]]
    assert order == ["start", "prepare", "train", "evaluate", "export", "end"]
    train = templates["train"]
    assert (train["retryStrategy"]["limit"], train["container"]["image"]) == (3, "registry/headway:1")
    assert train["retryStrategy"]["expression"] == "asInt(lastRetry.exitCode) != 202"
    assert "exit $c" in str(train["container"]["command"]), "the exit code of a step is that of its pod"
    assert train["container"]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    mounts = {mount["mountPath"] for mount in train["container"]["volumeMounts"]}
    assert {"/runs", "/data"} <= mounts
    assert {"secretRef": {"name": "storage"}} in train["container"]["envFrom"] or "storage" in json.dumps(train)
