"""Pins: what a file names by a tag is found, refused and written; a registry is asked as registries document."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headway.cli.application import application
from headway.clouds.supply.pins import check_pinned, pin, references
from headway.clouds.supply.registry import resolve_digest, split_image
from headway.core.errors import ConfigError

DIGEST = f"sha256:{'a1' * 32}"
NEWER = f"sha256:{'b2' * 32}"
COMMIT = "c3" * 20

DOCKERFILE = f"""\
ARG BASE=docker.io/library/debian:12-slim@{DIGEST}
ARG OTHER="registry.example:5000/team/base:1"
FROM ${{BASE}} AS system
FROM system AS torch
# FROM a comment:1
FROM --platform=$BUILDPLATFORM ${{OTHER}} AS more
FROM scratch AS empty
COPY --from=torch /a /a
COPY --from=0 /a /a
COPY --from=ghcr.io/owner/tool:2 /tool /tool
RUN --mount=type=bind,from=busybox:1,target=/x true
"""

WORKFLOW = f"""\
jobs:
  one:
    container: node:20
    services:
      db:
        image: "postgres:16"
    steps:
      - uses: actions/checkout@{COMMIT} # v7.0.1
      - uses: actions/cache/restore@v5 # the cache
      - uses: ./.github/actions/setup
      - uses: docker://alpine:3
"""


@pytest.fixture
def dockerfile(tmp_path: Path) -> Path:
    file = tmp_path / "Dockerfile"
    file.write_text(DOCKERFILE, encoding="utf-8")
    return file


@pytest.fixture
def workflow(tmp_path: Path) -> Path:
    file = tmp_path / "ci.yml"
    file.write_text(WORKFLOW, encoding="utf-8")
    return file


def test_images_of_a_dockerfile_are_found_where_they_are_written(dockerfile: Path) -> None:
    assert [(one.line, one.text, one.pinned) for one in references(dockerfile)] == [
        (1, f"docker.io/library/debian:12-slim@{DIGEST}", True),
        (2, "registry.example:5000/team/base:1", False),
        (10, "ghcr.io/owner/tool:2", False),
        (11, "busybox:1", False),
    ]


def test_images_and_actions_of_a_workflow_are_found(workflow: Path) -> None:
    assert [(one.line, one.text, one.kind, one.pinned) for one in references(workflow)] == [
        (3, "node:20", "image", False),
        (6, "postgres:16", "image", False),
        (8, f"actions/checkout@{COMMIT}", "action", True),
        (9, "actions/cache/restore@v5", "action", False),
        (11, "alpine:3", "image", False),
    ]


def test_a_check_names_every_tag_with_its_line(dockerfile: Path) -> None:
    result = CliRunner().invoke(application(["image"]), ["image", "pin", "--check", str(dockerfile)])
    assert isinstance(result.exception, ConfigError)
    said = result.exception.render()
    assert "3 of 4 images" in said and f"{dockerfile}:2 registry.example:5000/team/base:1" in said
    assert dockerfile.read_text(encoding="utf-8") == DOCKERFILE


def test_pins_are_written_and_nothing_else(dockerfile: Path, workflow: Path) -> None:
    asked = []

    def commit_of(repository: str, tag: str) -> str:
        asked.append((repository, tag))
        return COMMIT

    changes = pin(dockerfile, lambda name: NEWER, commit_of)
    assert changes[f"docker.io/library/debian:12-slim@{DIGEST}"] == f"docker.io/library/debian:12-slim@{NEWER}"
    expected = DOCKERFILE.replace(DIGEST, NEWER)
    for name in ("registry.example:5000/team/base:1", "ghcr.io/owner/tool:2", "busybox:1"):
        expected = expected.replace(name, f"{name}@{NEWER}")
    assert dockerfile.read_text(encoding="utf-8") == expected

    pin(workflow, lambda name: NEWER, commit_of)
    assert asked == [("actions/cache", "v5")]
    lines = workflow.read_text(encoding="utf-8").splitlines()
    assert lines[8] == f"      - uses: actions/cache/restore@{COMMIT} # v5"
    assert lines[7] == WORKFLOW.splitlines()[7]
    assert check_pinned([dockerfile, workflow]) == 9


def test_a_tag_that_nobody_resolves_leaves_the_file(dockerfile: Path) -> None:
    def refuse(name: str) -> str:
        raise ConfigError("no", where=name)

    with pytest.raises(ConfigError):
        pin(dockerfile, refuse, lambda repository, tag: COMMIT)
    assert dockerfile.read_text(encoding="utf-8") == DOCKERFILE


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("debian", ("docker.io", "library/debian", "latest")),
        ("debian:12-slim", ("docker.io", "library/debian", "12-slim")),
        ("owner/name:1", ("docker.io", "owner/name", "1")),
        ("docker.io/library/debian:12", ("docker.io", "library/debian", "12")),
        ("ghcr.io/owner/name:1.2", ("ghcr.io", "owner/name", "1.2")),
        ("127.0.0.1:5000/name", ("127.0.0.1:5000", "name", "latest")),
    ],
)
def test_a_short_name_is_completed_as_docker_does(name: str, parts: tuple[str, str, str]) -> None:
    assert split_image(name) == parts


class Registry(BaseHTTPRequestHandler):
    """A registry that wants a token, as public ones do."""

    def do_HEAD(self) -> None:
        port = self.server.server_address[1]
        if self.headers.get("Authorization") != "Bearer given":
            self.send_response(401)
            realm = f'Bearer realm="http://127.0.0.1:{port}/token",service="here",scope="ignored"'
            self.send_header("WWW-Authenticate", realm)
        elif self.path == "/v2/team/name/manifests/1" and "image.index" in self.headers["Accept"]:
            self.send_response(200)
            self.send_header("Docker-Content-Digest", DIGEST)
        elif self.path == "/v2/team/odd/manifests/1":
            self.send_response(200)
        else:
            self.send_response(404)
        self.end_headers()

    def do_GET(self) -> None:
        assert self.path == "/token?service=here&scope=repository%3Ateam%2F" + self.path.rpartition("2F")[2]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"token": "given"}).encode())

    def log_message(self, *words: object) -> None:
        """Say nothing."""


@pytest.fixture
def registry() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_registry_is_asked_with_the_token_that_it_gives(registry: str) -> None:
    assert resolve_digest(f"{registry}/team/name:1") == DIGEST


def test_a_tag_that_is_not_there_is_reported(registry: str) -> None:
    with pytest.raises(ConfigError, match="status 404"):
        resolve_digest(f"{registry}/team/name:2")
    with pytest.raises(ConfigError, match="no digest"):
        resolve_digest(f"{registry}/team/odd:1")


def test_without_a_network_it_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="does not answer") as refused:
        resolve_digest("127.0.0.1:9/team/name:1")
    assert "@sha256:" in str(refused.value.fix)
