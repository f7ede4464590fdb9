"""The objects of Kubernetes for monitoring, judged by the published models of Prometheus's operator."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.tracking.kubernetes import Cluster, export_alerts
from support.parts_table import OPERATOR, OPERATOR_PACKAGE, program
from support.waits import LONG

pytestmark = pytest.mark.parts(OPERATOR)

_JUDGE = """
import { readFileSync } from "node:fs";
const models = await import(process.argv[1]);
for (const one of JSON.parse(readFileSync(0))) {
    try { new models[one.kind](one).validate(); console.log("ok"); }
    catch (error) { console.log(error.message); }
}
"""


def judged(objects: list[dict[str, Any]]) -> list[str]:
    node = program("node")
    if node is None or not OPERATOR_PACKAGE.is_dir():
        pytest.skip("there are no models of Prometheus's operator: tests/parts/install.sh")
    index = OPERATOR_PACKAGE / "monitoring.coreos.com" / "v1" / "index.js"
    command = [node, "--input-type=module", "--eval", _JUDGE, "--", index.as_uri()]
    done = subprocess.run(command, input=json.dumps(objects), capture_output=True, text=True, timeout=LONG, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_operator_takes_the_rules_and_the_monitor(tmp_path: Path) -> None:
    cluster = Cluster("team", "stack", "registry/headway:1", "runs")
    texts = [path.read_text() for path in export_alerts(tmp_path, cluster) if path.name.startswith("headway-")]
    found = [one for text in texts for one in yaml.safe_load_all(text) if one["apiVersion"].startswith("monitoring")]
    assert {one["kind"] for one in found} == {"PrometheusRule", "ServiceMonitor"}
    assert judged(found) == ["ok", "ok"]
    for one in found:
        broken = json.loads(json.dumps(one).replace('"30s"', '"half a minute"').replace('"critical"', "5"))
        assert judged([broken]) != ["ok"], "the judge judges"
