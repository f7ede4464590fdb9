"""Images: what is asked of an engine, what never gets into a layer, and how an image on disk is read."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from headway.clouds.supply.build import ImageRequest, PackageIndex, build_command, build_image, find_engine, pip_index
from headway.clouds.supply.fit import IMAGES, BuiltImage, Fit, fitting_image, image_problems, image_row, remember
from headway.clouds.supply.layout import read_image
from headway.core.errors import ConfigError, HeadwayError

LISTING = """\
:env:.find-links='{wheels}'
global.cert='{cert}'
global.constraint='/etc/constraints.txt'
global.extra-index-url='file://{index}/simple'
global.find-links='/somewhere/else'
global.index-url='https://user:secret@packages.example/simple'
a line that is none
"""


@pytest.fixture
def index(tmp_path: Path) -> PackageIndex:
    for name in ("wheels", "index/simple"):
        (tmp_path / name).mkdir(parents=True)
    cert = tmp_path / "ca.pem"
    cert.touch()
    return pip_index(LISTING.format(wheels=tmp_path / "wheels", index=tmp_path / "index", cert=cert))


def test_only_places_of_packages_are_taken_from_pip(index: PackageIndex, tmp_path: Path) -> None:
    assert set(index.settings) == {"extra-index-url", "find-links", "index-url"}
    assert index.settings["find-links"] == str(tmp_path / "wheels"), "the environment wins, though it is listed first"
    assert index.folders == {str(tmp_path / "index"): "/mnt/packages/0", str(tmp_path / "wheels"): "/mnt/packages/1"}


def test_the_configuration_in_the_build_names_the_mounts(index: PackageIndex) -> None:
    text = index.as_text()
    assert "extra-index-url = file:///mnt/packages/0/simple\n" in text
    assert "index-url = https://user:secret@packages.example/simple\n" in text
    assert "cert = /run/secrets/ca\n" in text and "constraint" not in text


def test_credentials_of_an_index_are_on_no_command_line(index: PackageIndex, tmp_path: Path) -> None:
    request = ImageRequest("lab:1", "serve", {"TORCH_BUILD": "cu130"}, "linux/arm64", tmp_path)
    command = build_command("buildah", request, index, {"pip": tmp_path / "pip.conf"})
    assert "secret@" not in " ".join(command)
    assert command[:5] == ["buildah", "build", "--layers", "--format", "docker"]
    assert f"{tmp_path / 'index'}:/mnt/packages/0:ro" in command
    for words in (
        ["--target", "serve"],
        ["--tag", "lab:1"],
        ["--platform", "linux/arm64"],
        ["--secret", f"id=pip,src={tmp_path / 'pip.conf'}"],
        ["--build-arg", "TORCH_BUILD=cu130"],
    ):
        at = command.index(words[1])
        assert command[at - 1 : at + 1] == words


def test_docker_refuses_folders_that_its_build_cannot_read(index: PackageIndex) -> None:
    with pytest.raises(ConfigError, match="folder of packages"):
        build_command("docker", ImageRequest("lab:1"), index, {})
    plain = PackageIndex({"index-url": "https://packages.example/simple"})
    assert build_command("docker", ImageRequest("lab:1"), plain, {})[:4] == ["docker", "buildx", "build", "--load"]


def stand_in(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program of that name first on the path."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_secrets_are_private_and_gone_after_the_build(
    index: PackageIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"
    script = f"""
        for word in "$@"; do
            case "$word" in id=pip,src=*)
                file=${{word#id=pip,src=}}; stat -c %a "$file" > {seen}; echo "$file" >> {seen}; cat "$file" >> {seen};;
            esac
        done
        [ "$1" = build ] || exit 3"""
    stand_in(tmp_path / "bin", "buildah", script, monkeypatch)
    with pytest.raises(HeadwayError, match="buildah push ended with 3"):
        build_image("buildah", ImageRequest("lab:1", context=tmp_path), index, tmp_path / "image")
    mode, file, *text = seen.read_text(encoding="utf-8").splitlines()
    assert stat.filemode(int(mode, 8) | stat.S_IFREG) == "-rw-------" and "[global]" in text
    assert not Path(file).exists()


def test_an_engine_that_does_not_answer_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path / "bin", "docker", "exit 1", monkeypatch)
    stand_in(tmp_path / "bin", "buildah", "exit 0", monkeypatch)
    assert find_engine() == "buildah"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no engine"):
        find_engine()


def blob(layout: Path, content: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(content).hexdigest()
    file = layout / "blobs" / "sha256" / digest
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return {"digest": f"sha256:{digest}", "size": len(content)}


def make_layout(layout: Path, *, history: list[dict[str, Any]], layers: list[bytes], nested: bool = False) -> None:
    """An image as an engine writes it; `nested` as buildx does, with an index within the index."""
    diffs = [f"sha256:{hashlib.sha256(one).hexdigest()}" for one in layers]
    about = {"User": "10001:10001"}
    config = {"architecture": "arm64", "config": about, "rootfs": {"diff_ids": diffs}, "history": history}
    manifest = {"config": blob(layout, json.dumps(config).encode()), "layers": [blob(layout, one) for one in layers]}
    found = {"mediaType": "application/vnd.oci.image.manifest.v1+json", **blob(layout, json.dumps(manifest).encode())}
    if nested:
        inner = blob(layout, json.dumps({"manifests": [found]}).encode())
        found = {"mediaType": "application/vnd.oci.image.index.v1+json", **inner}
    (layout / "index.json").write_text(json.dumps({"manifests": [found]}), encoding="utf-8")


@pytest.mark.parametrize("nested", [False, True])
def test_layers_have_their_sizes_and_what_made_them(tmp_path: Path, nested: bool) -> None:
    history = [{"created_by": "RUN torch"}, {"created_by": "ENV A=1", "empty_layer": True}, {"created_by": "COPY src"}]
    make_layout(tmp_path, history=history, layers=[b"base", b"torch!!", b"src"], nested=nested)
    image = read_image(tmp_path)
    assert [(one.size, one.made_by) for one in image.layers] == [(4, ""), (7, "RUN torch"), (3, "COPY src")]
    assert (image.size, image.architecture, image.user) == (14, "arm64", "10001:10001")
    assert image.layers[1].digest == f"sha256:{hashlib.sha256(b'torch!!').hexdigest()}"


@pytest.mark.parametrize(
    "index",
    [
        "",
        "[]",
        '{"manifests": []}',
        '{"manifests": [{"digest": "sha256:../../passwd"}]}',
        '{"manifests": [{"digest": 3}]}',
    ],
)
def test_a_damaged_image_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "index.json").write_text(index, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"cannot be read|there is no image"):
        read_image(tmp_path)


def test_indexes_that_lead_to_each_other_end(tmp_path: Path) -> None:
    digest = "0" * 64
    leads = {"manifests": [{"mediaType": "application/vnd.oci.image.index.v1+json", "digest": f"sha256:{digest}"}]}
    (tmp_path / "blobs" / "sha256").mkdir(parents=True)
    for file in (tmp_path / "index.json", tmp_path / "blobs" / "sha256" / digest):
        file.write_text(json.dumps(leads), encoding="utf-8")
    with pytest.raises(ConfigError, match="do not end"):
        read_image(tmp_path)


@pytest.mark.parametrize(
    ("gpus", "accelerator", "fit"),
    [
        (0, None, Fit("cpu")),
        (8, "H100", Fit("cu130")),
        (8, "NVIDIA-A100-SXM4-80GB", Fit("cu130")),
        (8, "V100", Fit("cu126")),
        (4, "Tesla T4", Fit("cu130")),
        (4, "GH200", Fit("cu130", "linux/arm64")),
        (8, "MI300X", None),
    ],
)
def test_the_image_follows_the_accelerator(gpus: int, accelerator: str | None, fit: Fit | None) -> None:
    assert fitting_image(gpus, accelerator) == fit


def test_a_launch_is_refused_with_an_image_for_other_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    layout = IMAGES / "train"
    layout.mkdir(parents=True)
    remember(layout, BuiltImage("lab-train:1", "cpu", "amd64"))
    [problem] = image_problems(f"lab-train:1@sha256:{'0' * 64}", 8, "H100")
    assert "for processors only" in problem.what and "TORCH_BUILD=cu130" in str(problem.fix)
    assert not list(image_problems("lab-train:1", 0, None))
    assert not list(image_problems("registry.example/other:1", 8, "H100")), "it was built elsewhere"
    remember(layout, BuiltImage("lab-train:1", "cu130", "amd64"))
    [problem] = image_problems("lab-train:1", 4, "GH200")
    assert "is for amd64, and GH200 needs arm64" in problem.what and "PLATFORM=linux/arm64" in str(problem.fix)
    (layout / "headway.json").write_text("[]", encoding="utf-8")
    assert not list(image_problems("lab-train:1", 4, "GH200"))


def test_a_launch_says_which_image_fits() -> None:
    assert image_row(None, 8, "H100") == "none; fits: make image TARGET=train TORCH_BUILD=cu130"
    assert image_row("r/lab:1", 8, "MI300X") == "r/lab:1; no image of the Dockerfile fits MI300X"
