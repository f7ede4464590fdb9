"""`kubectl` against an API server that is a stand-in, and a whole training whose pod is deleted on the way."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.clouds.launchers.launcher import find_launcher
from headway.clouds.launchers.record import read_handle
from headway.core.process.waiting import wait_until
from headway.lab.bench.analysis import efficiency
from headway.lab.bench.charts import KINDS
from headway.lab.bench.results import read_results
from headway.lab.chaos.machines import can_make_namespaces
from support.kubelet import Api, Kubelet
from support.launchers import documents, job
from support.machines import machines
from support.parts_table import KUBECTL, program
from support.ports import free_ports
from support.runs import headway, state_hash
from support.waits import LONG

pytestmark = [pytest.mark.parts(KUBECTL), pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
#: `tests/parts/install.sh` makes this environment: `kmock` brings a plug-in for pytest, which would stay out of others.
KMOCK = ROOT / "build" / "parts" / "kmock" / "bin" / "python"
#: The stand-in has no schemas by which `kubectl` could validate.
_KUBECTL = """#!/bin/sh
case " $* " in
    *" logs "*) for log in pods/*.log; do sed "s|^|[pod/$(basename "$log" .log)/headway] |" "$log"; done; exit 0;;
    *" apply "*|*" create "*) set -- "$@" --validate=false;;
esac
exec {kubectl} "$@"
"""


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    """An API server, and a `kubectl` with a context for it."""
    python = os.environ.get("HEADWAY_KMOCK_PYTHON") or str(KMOCK)
    if not Path(python).exists() or program("kubectl") is None:
        pytest.skip("there is no stand-in for an API server: tests/parts/install.sh makes build/parts/kmock")
    (port,) = free_ports(1)
    with (tmp_path / "api.log").open("wb") as log:
        server = subprocess.Popen([python, str(HERE / "kubernetes_api.py"), str(port)], stdout=log, stderr=log)
    found = Api(f"http://127.0.0.1:{port}")
    kinds: dict[str, Any] = {"clusters": [{"name": "s", "cluster": {"server": f"http://127.0.0.1:{port}"}}]}
    kinds |= {"users": [{"name": "u", "user": {}}]}
    kinds |= {
        "contexts": [{"name": "stand-in", "context": {"cluster": "s", "user": "u"}}],
        "current-context": "stand-in",
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **kinds}))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "kubectl").write_text(_KUBECTL.format(kubectl=program("kubectl")))
    (tmp_path / "bin" / "kubectl").chmod(0o755)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    try:
        assert wait_until(lambda: "ready" in (tmp_path / "api.log").read_text(), LONG, 0.1)
        yield found
    finally:
        server.terminate()
        server.wait()


def define(api: Api, resource: str) -> None:
    """Have the API server know a kind of a controller."""
    about = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
    definition = {**about, "metadata": {"name": resource}}
    api.ask("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", "POST", definition)


@pytest.mark.parametrize("target", ["kubernetes", "jobset", "trainjob", "pytorchjob", "rayjob"])
def test_kubectl_applies_reads_and_deletes_every_kind(api: Api, tmp_path: Path, target: str) -> None:
    launcher, given = find_launcher(target), job(machines=1)
    envelope = launcher.envelope  # type: ignore[attr-defined]
    folder = tmp_path / "files"
    folder.mkdir()
    files = launcher.files(given)
    for name, text in files.items():
        (folder / name).write_text(text)
    if envelope.install is not None:
        with pytest.raises(Exception, match="does not know the kind"):
            launcher.check(job("launch.kubernetes.autoscaled=true", machines=1))
        define(api, envelope.resource)
    launcher.check(job("launch.kubernetes.autoscaled=true", "launch.kubernetes.context=stand-in", machines=1))
    handle = launcher.submit(given, folder)
    assert launcher.status(handle).state == "waiting"
    asked = ["kubectl", "get", envelope.resource, "tiny-run", "--output=json"]
    there = json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
    assert there["spec"] == documents(files)[-1]["spec"]
    with pytest.raises(Exception, match="has a job of this name already"):
        launcher.check(job("launch.kubernetes.autoscaled=true", machines=1))
    launcher.cancel(handle)
    assert launcher.status(handle).state == "gone"
    left = subprocess.run(["kubectl", "get", "configmaps,services", "--output=name"], capture_output=True, text=True)
    assert not left.stdout.strip()


def test_a_server_is_applied_when_its_secrets_are_there(api: Api, tmp_path: Path) -> None:
    words = ["launch", "serve", "my-model@prod", "--on", "kubernetes", "-y", "--registry", "s3://bucket/registry"]
    words += ["--replicas", "2:4", "launch.image=r/serve:1", "launch.kubernetes.cpus=2"]
    refused = headway(*words, fresh=True, cwd=tmp_path)
    assert refused.returncode == 2 and "there is no secret my-model-key" in refused.stderr, refused.stderr
    for name in ("my-model-key", "my-model-tls"):
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": "default"}}
        api.ask("/api/v1/namespaces/default/secrets", "POST", secret)
    for _ in range(2):  # applying it again changes nothing
        done = headway(*words, fresh=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    asked = ["kubectl", "get", "deployments.apps", "my-model", "--output=json"]
    there = json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
    written = yaml.safe_load_all((tmp_path / "serve/my-model/20-serve.yaml").read_text())
    assert there["spec"] == next(written)["spec"]


def test_a_pod_is_deleted_and_the_run_ends_with_the_same_bits(
    api: Api, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    volumes = f"launch.kubernetes={{volumes: [{{claim: all, mount: {tmp_path}}}], prepared: true}}"
    config = tiny(train={"steps": 300}, checkpoint={"every": "1 h"})
    words = ("--on", "kubernetes", "-y", "name=pods", "launch.image=local", volumes)
    done = headway("launch", config, *words, fresh=True)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "pods"
    pods = tmp_path / "pods"
    pods.mkdir()
    kubelet = Kubelet(api, "default", "pods", pods)
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(kubelet.run, LONG)
        metrics = run / "metrics.jsonl"
        assert wait_until(lambda: metrics.exists() and metrics.stat().st_size > 5000, LONG, 0.1)
        status = headway("launch", "status", run, "--json", fresh=True)
        assert status.returncode == 0, status.stderr
        assert json.loads(status.stdout)["engine"]["state"] == "running", status.stderr
        subprocess.run(["kubectl", "delete", "pod", "pods-0-1", "--wait=false"], check=True, capture_output=True)
        assert ending.result() == "Complete", (pods / "pods-0-1.log").read_text()
    assert kubelet.codes == {0: [75, 0]}
    handle = read_handle(run)
    assert handle is not None and find_launcher("kubernetes").status(handle).state == "finished"
    whole = headway("train", config, "name=whole")
    assert whole.returncode == 0, whole.stderr
    assert state_hash(run) == state_hash(tmp_path / "runs" / "whole")


def test_a_final_exit_code_fails_the_job_at_once(api: Api, tiny: Callable[..., Path], tmp_path: Path) -> None:
    volumes = f"launch.kubernetes={{volumes: [{{claim: all, mount: {tmp_path}}}], prepared: true}}"
    config = tiny(optimizer={"learning_rate": 1e30}, train={"skip_limit": 1})
    done = headway("launch", config, "--on", "kubernetes", "-y", "name=bad", "launch.image=local", volumes, fresh=True)
    assert done.returncode == 0, done.stderr
    (tmp_path / "pods").mkdir()
    kubelet = Kubelet(api, "default", "bad", tmp_path / "pods")
    assert (kubelet.run(LONG), kubelet.codes) == ("Failed", {0: [5]})


def page_example() -> list[tuple[str, str]]:
    """Commands of the page's first example over machines, with what the page says that they print."""
    page = (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")
    section = page.split("## Over machines: a first example")[1].partition("    $ ")[2]
    block, *_ = re.split(r"\n(?=\S)", section)
    shown = (one.partition("\n") for one in block.split("\n    $ "))
    return [(command, textwrap.dedent(printed)) for command, _, printed in shown]


def alike(text: str) -> list[list[str]]:
    """The words of a text, line by line, without what differs from one measurement to another."""
    plain = re.sub(r"was lost: .*?(?=  |$)", "was lost", text, flags=re.MULTILINE)
    return [re.sub(r"\d[\d.,]*k?", "#", line).split() for line in plain.strip().splitlines()]


@pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces need root, and `ip` (iproute2)")
def test_the_first_example_over_machines_survives_a_machine_in_a_cell_and_its_lead_between_cells(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the page shows is what the commands print, but for the figures."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    pods = tmp_path / "pods"
    pods.mkdir()
    (launch, launched), *shown = page_example()
    done = headway(*shlex.split(launch)[1:], fresh=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert alike(done.stdout) == alike(launched)
    with machines(4, tmp_path) as nodes, ThreadPoolExecutor(1) as pool:
        kubelet = Kubelet(api, "default", "bench-smoke", pods, [node.stands for node in nodes])
        ending = pool.submit(kubelet.run, LONG)

        def kill_when(said: str, index: int) -> None:
            def is_said() -> bool:
                logs = pods.glob(f"bench-smoke-{index}-*.log")
                return ending.done() or any(said in log.read_text(errors="replace") for log in logs)

            assert wait_until(is_said, LONG, 0.02)
            nodes[index].stands.kill()

        kill_when("ddp-w4-1m-fp32-b1-t64-m4: worker 3", 3)
        kill_when("[5/6]", 0)
        assert ending.result() == "Complete", "\n".join(log.read_text() for log in sorted(pods.glob("*.log")))
    assert kubelet.codes == {0: [137, 0], 1: [0], 2: [0], 3: [137, 0]}
    for command, printed in shown:
        done = headway(*shlex.split(command)[1:], fresh=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        print(done.stdout)
        assert alike(done.stdout)[: len(alike(printed))] == alike(printed)
    found = {one.cell.name: one for one in read_results(tmp_path / "bench/cluster")}
    statuses = {name: one.status for name, one in found.items()}
    assert len(found) == 6 and statuses.pop("ddp-w4-1m-fp32-b1-t64-m4") == "killed" and set(statuses.values()) == {"ok"}
    shares = [one for one in found.values() if one.cell.machines > 1 and one.status == "ok"]
    assert all(efficiency(one, list(found.values())) and one.measured[0].communication for one in shares)
    folder = tmp_path / "bench/cluster"
    assert {path.stem for path in (folder / "plots").iterdir()} == set(KINDS)
    assert "GPU mean | GPU p95" in (folder / "report.md").read_text() and (folder / "report.html").exists()


@pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces need root, and `ip` (iproute2)")
def test_the_job_of_a_jobset_measures_over_machines(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test makes the Job, as the controller of JobSet does."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    define(api, "jobsets.jobset.x-k8s.io")
    pods = tmp_path / "pods"
    pods.mkdir()
    words = ("smoke", "machines=2", "workers=1", "strategy=ddp", "train.device=cpu", "launch.image=local")
    done = headway("launch", "bench", *words, "--on", "jobset", "-y", fresh=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    jobset = api.ask("/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets/bench-smoke")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    name = f"bench-smoke-{replicated['name']}-0"
    made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, **replicated["template"]}
    api.ask("/apis/batch/v1/namespaces/default/jobs", "POST", made)
    with machines(2, tmp_path) as nodes:
        kubelet = Kubelet(api, "default", name, pods, [node.stands for node in nodes], run="bench-smoke")
        assert kubelet.run(LONG) == "Complete", "\n".join(log.read_text() for log in sorted(pods.glob("*.log")))
    done = headway("bench", "collect", "runs/bench-smoke", "--output", "collected", fresh=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (found,) = read_results(tmp_path / "collected")
    assert (found.cell.machines, found.cell.workers, found.status) == (2, 2, "ok")
