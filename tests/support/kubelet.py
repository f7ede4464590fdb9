"""Plays the Job controller and the kubelet: every index of a Job is a process, with grace, exit codes and policies.

Images, mounts and probes mean nothing here: a pod's command runs on this machine, with the pod's variables, and with
its config from the ConfigMap, in an empty folder. With machines that are network namespaces, each pod is on one of
them, has an address and is found by its name.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib import error, request

from headway.lab.chaos.machines import NetworkMachine

#: Runs a command as a pod: under its host name, with a file that says where the other pods are.
_AS_POD = 'hostname "$0"; mount --bind hosts /etc/hosts; exec "$@"'


class Api:
    """The API server, as the controllers see it."""

    def __init__(self, address: str) -> None:
        self._address = address

    def ask(self, path: str, method: str = "GET", value: Any = None) -> Any:
        """Return an object, or None if it is not there."""
        data = None if value is None else json.dumps(value).encode()
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        asked = request.Request(self._address + path, data, {"Content-Type": kind}, method=method)
        try:
            with request.urlopen(asked, timeout=10) as answer:
                return json.loads(answer.read())
        except error.HTTPError as wrong:
            if wrong.code == 404:
                return None
            raise


class Kubelet:
    """Runs the pods of one Job until it is complete, failed or deleted.

    Args:
        api: The API server.
        namespace: Namespace of the Job.
        name: Its name.
        folder: Gets a folder and a log for each pod.
        machines: Where its pods run, by index; all on this machine when not given.
        run: Name of the ConfigMap and of the subdomain of its pods; that of the Job when not given.
    """

    def __init__(
        self,
        api: Api,
        namespace: str,
        name: str,
        folder: Path,
        machines: Sequence[NetworkMachine] = (),
        *,
        run: str | None = None,
    ) -> None:
        self._machines, self._run = machines, run or name
        self._api, self._name, self._folder = api, name, folder
        self._core = f"/api/v1/namespaces/{namespace}"
        self._job_path = f"/apis/batch/v1/namespaces/{namespace}/jobs/{name}"
        self._pods: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}
        self._starts: Counter[int] = Counter()
        self.codes: dict[int, list[int]] = {}
        """Exit codes of the pods of each index."""

    def run(self, seconds: float) -> str:
        """Run the Job to its end: Complete, Failed or Deleted."""
        end, done, failed, grace = time.monotonic() + seconds, set[int](), 0, 1.0
        try:
            while time.monotonic() < end:
                job = self._api.ask(self._job_path)
                if job is None:
                    self._stop_all(grace)
                    return "Deleted"
                job_spec = job["spec"]
                grace = job_spec["template"]["spec"]["terminationGracePeriodSeconds"]
                for index in set(range(job_spec["completions"])) - done - self._pods.keys():
                    self._start(index, job_spec["template"])
                for index, (pod, process) in list(self._pods.items()):
                    if process.poll() is None and self._api.ask(f"{self._core}/pods/{pod}") is None:
                        self._stop(process, grace)
                    code = process.poll()
                    if code is None:
                        continue
                    del self._pods[index]
                    if self._machines:
                        self._machines[index].kill()  # nothing of a pod outlives its first process
                    self._api.ask(f"{self._core}/pods/{pod}", "DELETE")
                    code = code if code >= 0 else 128 - code
                    self.codes.setdefault(index, []).append(code)
                    action = self._action(job_spec, code)
                    if code == 0:
                        done.add(index)
                    failed += action == "Count"
                    if action == "FailJob" or failed > job_spec["backoffLimit"]:
                        return self._finish("Failed")
                enough = [
                    {int(rule["succeededIndexes"])} for rule in job_spec.get("successPolicy", {}).get("rules", [])
                ]
                if any(indexes <= done for indexes in [*enough, set(range(job_spec["completions"]))]):
                    return self._finish("Complete")
                time.sleep(0.2)
            raise TimeoutError(self.codes)
        finally:
            self._stop_all(1)

    def _action(self, spec: dict[str, Any], code: int) -> str:
        """What the pod failure policy does: the first rule that matches."""
        for rule in spec["podFailurePolicy"]["rules"]:
            if code in rule.get("onExitCodes", {}).get("values", ()):
                return str(rule["action"])
        return "Ignore" if code == 0 else "Count"

    def _start(self, index: int, template: dict[str, Any]) -> None:
        self._starts[index] += 1
        pod = f"{self._name}-{index}-{self._starts[index]}"
        container = template["spec"]["containers"][0]
        variables = {one["name"]: self._value(one, index) for one in container["env"]}
        folder = self._folder / pod
        folder.mkdir()
        (mount,) = (one["mountPath"] for one in container["volumeMounts"] if one["name"] == "config")
        config = self._api.ask(f"{self._core}/configmaps/{self._run}")["data"]["config.yaml"]
        (folder / "config.yaml").write_text(config)
        words = [word.replace(mount, str(folder)) for word in container["command"]]
        assert words[0] == "headway"
        own = {**os.environ, **variables, "JOB_COMPLETION_INDEX": str(index)}
        with (self._folder / f"{pod}.log").open("wb") as log:
            command = [*self._within(index, folder), sys.executable, "-m", *words]
            process = subprocess.Popen(command, stdout=log, stderr=log, env=own, cwd=folder)
        about = {"name": pod, "labels": template["metadata"]["labels"]}
        running = {"apiVersion": "v1", "kind": "Pod", "metadata": about, "status": {"phase": "Running"}}
        self._api.ask(f"{self._core}/pods", "POST", running)
        self._pods[index] = pod, process
        self._api.ask(self._job_path, "PATCH", {"status": {"active": len(self._pods), "ready": len(self._pods)}})

    def _within(self, index: int, folder: Path) -> list[str]:
        """What runs a command on the machine of a pod, where names of pods are known."""
        if not self._machines:
            return []
        hosts = (f"{one.address} {self._name}-{one.number}.{self._run}\n" for one in self._machines)
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(hosts))
        named = ("unshare", "--uts", "--mount", "sh", "-c", _AS_POD, f"{self._name}-{index}")
        return ["ip", "netns", "exec", self._machines[index].space, *named]

    def _value(self, variable: dict[str, Any], index: int) -> str:
        if "value" in variable:
            return str(variable["value"])
        if "fieldRef" in variable["valueFrom"]:
            assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
            return self._machines[index].address
        reference = variable["valueFrom"]["secretKeyRef"]
        secret = self._api.ask(f"{self._core}/secrets/{reference['name']}")
        return str(secret["stringData"][reference["key"]])

    def _stop(self, process: subprocess.Popen[bytes], grace_seconds: float) -> None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _stop_all(self, grace_seconds: float) -> None:
        for index, (_, process) in list(self._pods.items()):
            self._stop(process, grace_seconds)
            self.codes.setdefault(index, []).append(process.returncode)
            del self._pods[index]

    def _finish(self, condition: str) -> str:
        found = {"conditions": [{"type": condition, "status": "True"}], "active": 0, "ready": 0}
        self._api.ask(self._job_path, "PATCH", {"status": found})
        return condition
