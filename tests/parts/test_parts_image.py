"""The image of this repository, really built: layers that are reused, a training without network, nothing left in it.

The base is a Debian that mmdebstrap makes, so no registry is needed.
"""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.clouds.supply.layout import Image, read_image
from support.parts_table import BUILDAH

ROOT = Path(__file__).parents[2]
STORAGE = ROOT / "build" / "parts" / "images"
BASE = "localhost/headway-base:test"
NAME = "localhost/headway-train:test"
#: What an image of this repository is made of (.dockerignore).
PARTS = ("Dockerfile", ".dockerignore", "docker", "configs", "src", "pyproject.toml", "README.md", "LICENSE")
#: A setting of pip that reaches the build, and that must reach no layer.
MARK = "packages.hunter2.invalid"
LIMIT_SECONDS = 1500

pytestmark = [pytest.mark.parts(BUILDAH), pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Variables with which buildah keeps images in a folder of this checkout."""
    missing = [name for name in ("buildah", "runc", "mmdebstrap") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"building needs root, and {', '.join(missing) or 'its programs'} (tests/parts/install.sh)")
    STORAGE.mkdir(parents=True, exist_ok=True)
    settings = STORAGE / "storage.conf"
    run_root = Path("/run") / f"headway-images-{ROOT.stat().st_ino}"
    lines = ["[storage]", 'driver = "overlay"', f'graphroot = "{STORAGE / "store"}"', f'runroot = "{run_root}"', ""]
    settings.write_text("\n".join(lines), encoding="utf-8")
    return {**os.environ, "CONTAINERS_STORAGE_CONF": str(settings), "PIP_TRUSTED_HOST": MARK}


def run(environment: dict[str, str], *words: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=environment, capture_output=True, text=True, check=False,
        timeout=LIMIT_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def base(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    names = run(environment, "buildah", "images", "--format", "{{.Name}}:{{.Tag}}")
    if BASE not in names.split():
        folder = tmp_path_factory.mktemp("base")
        run(environment, "mmdebstrap", "--quiet", "--variant=minbase", "bookworm", folder / "base.tar")
        (folder / "Dockerfile").write_text("FROM scratch\nADD base.tar /\n", encoding="utf-8")
        run(environment, "buildah", "build", "--format", "docker", "--tag", BASE, folder)
    return BASE


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("context")
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, folder / name)
    return folder


def build(environment: dict[str, str], context: Path, base: str) -> Image:
    run(
        environment, sys.executable, "-m", "headway", "image", "build", context, "--engine", "buildah", "--tag", NAME,
        "--arg", f"BASE={base}", "--arg", "TORCH_INDEX=", "--arg", "REVISION=abc",
    )  # fmt: skip
    return read_image(context / "build" / "images" / "train")


@pytest.fixture(scope="module")
def built(environment: dict[str, str], context: Path, base: str) -> Image:
    return build(environment, context, base)


@pytest.fixture
def container(environment: dict[str, str], built: Image) -> Iterator[str]:
    name = run(environment, "buildah", "from", NAME).strip()
    yield name
    run(environment, "buildah", "rm", name)


def inside(environment: dict[str, str], container: str, *words: str) -> str:
    return run(environment, "buildah", "run", "--network", "none", container, "--", *words)


def test_a_training_runs_without_network_as_an_ordinary_user(environment: dict[str, str], container: str) -> None:
    assert inside(environment, container, "id", "-u").strip() == "10001"
    network = inside(environment, container, "cat", "/proc/net/dev").splitlines()[2:]
    assert [line.partition(":")[0].strip() for line in network] == ["lo"]
    inside(environment, container, "sh", "-c", "headway train configs/smoke.yaml train.steps=20 2> runs/log")
    assert "step 20/20" in inside(environment, container, "cat", "runs/log")
    assert "step-00000020: good" in inside(environment, container, "headway", "checkpoints", "verify", "runs/smoke")
    inside(environment, container, "python", "/opt/headway/health.py", "train")
    # The system is not its own to change.
    code = "import os, sys; sys.exit(any(os.access(path, os.W_OK) for path in ('/opt/venv', '/opt/headway', '/etc')))"
    inside(environment, container, "python", "-c", code)


def test_the_image_says_what_it_is(built: Image) -> None:
    assert built.user == "10001:10001"
    assert built.labels["org.opencontainers.image.revision"] == "abc"
    assert built.labels["dev.headway.torch-build"] == "cpu"
    assert built.size > 100 * 2**20 and all(layer.made_by for layer in built.layers)


def test_no_layer_knows_the_index_of_packages(built: Image, context: Path) -> None:
    assert run(dict(os.environ, PIP_TRUSTED_HOST=MARK), sys.executable, "-m", "pip", "config", "list").count(MARK)
    blobs = list((context / "build" / "images" / "train" / "blobs" / "sha256").iterdir())
    assert len(blobs) == len(built.layers) + 2, "the manifest and the config, too"
    for blob in blobs:
        compressed = blob.read_bytes()[:2] == b"\x1f\x8b"
        with gzip.open(blob) if compressed else blob.open("rb") as file:
            before = b""
            while block := file.read(2**20):
                assert MARK.encode() not in before + block, blob.name
                before = block[-len(MARK) :]


def test_a_change_of_code_reuses_all_layers_below(
    environment: dict[str, str], context: Path, base: str, built: Image
) -> None:
    changed = context / "src" / "headway" / "notebook.py"
    changed.write_text(changed.read_text(encoding="utf-8") + "MARK_OF_THE_TEST = 1\n", encoding="utf-8")
    # No library is added, so their layer stays, too.
    project = context / "pyproject.toml"
    project.write_text(project.read_text(encoding="utf-8") + "\n[tool.other]\nkey = 1\n", encoding="utf-8")
    again = build(environment, context, base)
    before = [layer.digest for layer in built.layers]
    after = [layer.digest for layer in again.layers]
    assert after[:-2] == before[:-2]
    assert all("wheel" in layer.made_by or "COPY" in layer.made_by for layer in again.layers[-2:])
    assert not {*after[-2:]} & {*before[-2:]}
    name = run(environment, "buildah", "from", NAME).strip()
    code = "import pathlib, headway; print(pathlib.Path(headway.__file__).with_name('notebook.py').read_text()[-22:])"
    assert "MARK_OF_THE_TEST" in inside(environment, name, "python", "-c", code)
    run(environment, "buildah", "rm", name)
