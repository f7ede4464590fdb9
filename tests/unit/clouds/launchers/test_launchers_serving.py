"""`headway launch serve`: manifests that an API server takes, probes, bounds, secrets by name, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from headway.cli.application import application
from headway.clouds.launchers.serving import SERVE, SUPPORT
from support.pod_security import refusals

GOOD = ["my-model@prod", "--registry", "s3://bucket/registry", "launch.image=r/serve:1"]


def run(*words: str) -> Any:
    return CliRunner().invoke(application(["launch"]), ["launch", "serve", "--on", "kubernetes", "--dry-run", *words])


def documents(folder: Path, *words: str) -> list[dict[str, Any]]:
    done = run(*GOOD, "--out", str(folder), *words)
    assert done.exit_code == 0, done.output
    texts = [(folder / name).read_text(encoding="utf-8") for name in (SUPPORT, SERVE)]
    return [document for text in texts for document in yaml.safe_load_all(text)]


def of_kind(found: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (one,) = [document for document in found if document["kind"] == kind]
    return one


def why_refused(*words: str) -> str:
    done = run(*words)
    assert done.exit_code != 0
    return str(done.exception)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--replicas", "2:8", "launch.kubernetes.cpus=4", "launch.kubernetes.memory=16Gi"],
        ["--replicas", "1:3", "--scale-on", "headway_serve_requests_running=8", "launch.gpus_per_machine=1"],
        ["--replicas", "3", "launch.kubernetes.secret_names=[s3]", "launch.kubernetes.create_namespace=true"],
        [
            "launch.kubernetes.volumes=[{claim: models, mount: /models, size: 1Ti}]",
            "launch.kubernetes.service_account=a",
        ],
    ],
)
def test_an_api_server_takes_every_manifest(tmp_path: Path, words: list[str]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate").validate
    found = documents(tmp_path, *words)
    for document in found:
        validate(document, "1.37", strict=True)
    pod = of_kind(found, "Deployment")["spec"]["template"]
    assert refusals(pod["spec"], "restricted") == []
    assert pod["metadata"]["labels"].items() >= of_kind(found, "Service")["spec"]["selector"].items()


def test_a_server_has_probes_a_key_and_a_certificate(tmp_path: Path) -> None:
    spec = of_kind(documents(tmp_path), "Deployment")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/readyz",
        "readiness": "/readyz",
        "liveness": "/healthz",
    }
    assert all(probe["scheme"] == "HTTPS" and probe["port"] == "https" for probe in probes.values())
    (secrets,) = [volume for volume in spec["volumes"] if volume["name"] == "secrets"]
    assert [one["secret"]["name"] for one in secrets["projected"]["sources"]] == ["my-model-key", "my-model-tls"]
    variables = {one["name"]: one["value"] for one in container["env"]}
    assert variables["HEADWAY_API_KEY_FILE"] == "/etc/headway/secrets/api-key"
    assert container["command"][:3] == ["headway", "serve", "my-model@prod"]
    assert "--tls-cert" in container["command"]
    page = (tmp_path / "secrets.md").read_text(encoding="utf-8")
    assert "create secret generic my-model-key" in page and "create secret tls my-model-tls" in page


def options_of(verb: Any) -> Iterator[str]:
    """All options of a command, and of those below it."""
    for parameter in verb.params:
        yield from getattr(parameter, "opts", ())
    for below in getattr(verb, "commands", {}).values():
        yield from options_of(below)


def test_every_option_of_the_command_is_one_of_headway_serve(tmp_path: Path) -> None:
    from typer.main import get_command

    pytest.importorskip("headway.serve.cli.serve", reason="there is no headway serve")
    known = set(options_of(get_command(application(["serve"]))))
    assert "--drain-seconds" in known
    command = of_kind(documents(tmp_path), "Deployment")["spec"]["template"]["spec"]["containers"][0]["command"]
    assert {word for word in command if word.startswith("--")} <= known


def test_a_range_of_replicas_writes_an_autoscaler_with_these_bounds(tmp_path: Path) -> None:
    found = documents(tmp_path, "--replicas", "2:8", "launch.kubernetes.cpus=4")
    scaler = of_kind(found, "HorizontalPodAutoscaler")["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 8)
    assert scaler["scaleTargetRef"]["name"] == of_kind(found, "Deployment")["metadata"]["name"] == "my-model"
    assert "replicas" not in of_kind(found, "Deployment")["spec"], "applying it again would set the number back"
    fixed = documents(tmp_path / "fixed", "--replicas", "2")
    assert of_kind(fixed, "Deployment")["spec"]["replicas"] == 2
    assert not [document for document in fixed if document["kind"] == "HorizontalPodAutoscaler"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["my-model@prod", "--registry", "s3://b/r"], "needs an image"),
        (["my-model@prod", "launch.image=r/s"], "no pod can see the registry"),
        (["my-model@prod", "--registry", "/here", "launch.image=r/s"], "no pod can see /here"),
        (["/models/m", "launch.image=r/s"], "no pod can see /models/m"),
        (["hf://org/m", "launch.image=r/s"], "does not download models of the Hub"),
        ([*GOOD, "--replicas", "0"], "no bounds"),
        ([*GOOD, "--replicas", "4:2"], "no bounds"),
        ([*GOOD, "--replicas", "many"], "no number of pods"),
        ([*GOOD, "--replicas", "1:4"], "the use of processors"),
        ([*GOOD, "--scale-on", "load"], "no metric with a value"),
        ([*GOOD, "--name", "A_B"], "cannot name the objects"),
        ([*GOOD, "train.steps=3"], "keys of launch only"),
    ],
)
def test_what_could_not_run_is_refused(words: list[str], why: str) -> None:
    assert why in why_refused(*words)


def test_a_folder_on_a_volume_is_served(tmp_path: Path) -> None:
    volume = "launch.kubernetes.volumes=[{claim: models, mount: /models, read_only: true}]"
    done = run("/models/my-model", "launch.image=r/s", volume, "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    (deployment,) = [
        one for one in yaml.safe_load_all((tmp_path / SERVE).read_text(encoding="utf-8")) if one["kind"] == "Deployment"
    ]
    pod = deployment["spec"]["template"]["spec"]
    assert pod["containers"][0]["command"][2] == "/models/my-model"
    assert {"name": "volume-0", "mountPath": "/models", "readOnly": True} in pod["containers"][0]["volumeMounts"]
