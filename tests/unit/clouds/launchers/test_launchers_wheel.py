"""The wheel that travels with a launch: it is the code that runs, from a checkout and from an installed wheel alike."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from importlib import metadata
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import yaml

import headway
from headway.clouds.launchers import wheel
from headway.clouds.launchers.launcher import find_launcher
from headway.clouds.launchers.ray_job import runtime_environment
from headway.clouds.launchers.wheel import WHEEL, build_wheel
from headway.core.errors import ConfigError
from support.launchers import job
from support.waits import LONG

REMOTE = ("checkpoint.remote.url=s3://bucket/runs", "data.remote=gs://bucket/store")
#: Builds the wheel of the Headway that runs it.
AGAIN = """
import hashlib, headway, importlib.metadata as metadata
from headway.clouds.launchers.wheel import build_wheel
import headway.cli.main
print(headway.__file__, hashlib.sha256(build_wheel()).hexdigest(), len(metadata.requires("headway")))
"""


def test_a_wheel_installs_and_makes_the_same_wheel_again(tmp_path: Path) -> None:
    content = build_wheel()
    (tmp_path / WHEEL).write_bytes(content)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run([*pip, str(tmp_path / "there"), str(tmp_path / WHEEL)], check=True, timeout=LONG)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "there"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", AGAIN],
        capture_output=True, text=True, timeout=LONG, cwd=tmp_path, env=environment, check=True,
    )  # fmt: skip
    place, digest, count = done.stdout.split()
    assert place == str(tmp_path / "there" / "headway" / "__init__.py")
    assert digest == hashlib.sha256(content).hexdigest() and int(count) == len(metadata.requires("headway") or [])
    assert (tmp_path / "there" / "bin" / "headway").is_file()


def test_a_wheel_has_all_files_of_the_package_and_their_hashes() -> None:
    archive = zipfile.ZipFile(BytesIO(build_wheel()))
    root = Path(headway.__file__).parent
    wanted = {
        path.relative_to(root.parent).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name != "BUILD.bazel"
    }
    assert {name: archive.read(name) for name in archive.namelist() if name.startswith("headway/")} == wanted
    assert any(name.endswith(".html") for name in wanted) and "headway/py.typed" in wanted
    info = next(name for name in archive.namelist() if name.endswith("RECORD"))
    assert len(archive.read(info).decode().splitlines()) == len(archive.namelist())
    assert any("licenses/LICENSE" in name for name in archive.namelist())


def test_what_is_not_installed_makes_no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    def distribution(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(wheel.metadata, "distribution", distribution)
    with pytest.raises(ConfigError, match="is not installed") as caught:
        build_wheel()
    assert "launch.package" in str(caught.value.fix)


def test_a_task_of_skypilot_installs_the_wheel_that_launches(tmp_path: Path) -> None:
    launcher = find_launcher("sky")

    def task(*overrides: str) -> tuple[dict[str, Any], set[str]]:
        files = launcher.files(job(*REMOTE, *overrides, out=tmp_path))
        return yaml.safe_load(files["task.yaml"]), set(files)

    plain, files = task("launch.extras=[hf]")
    assert files == {"task.yaml", "config.yaml", WHEEL}
    assert plain["file_mounts"][f"~/headway/{WHEEL}"] == str(tmp_path / WHEEL)
    first, second = plain["setup"].splitlines()
    assert first == f'python -m pip install "$HOME/headway/{WHEEL}[hf,gcs,s3]"', "the URLs of the config need extras"
    assert "--force-reinstall --no-deps" in second, "a Headway of the same version may be there"
    named, files = task("launch.package=git+https://example.org/headway@v1")
    assert files == {"task.yaml", "config.yaml"}
    assert named["setup"].splitlines()[0] == "python -m pip install git+https://example.org/headway@v1"
    own, files = task("launch.sky.setup=[make install]")
    assert own["setup"] == "make install" and files == {"task.yaml", "config.yaml"}
    (tmp_path / "mine-2.0-py3-none-any.whl").write_bytes(b"wheel")
    given = job(*REMOTE, f"launch.package={tmp_path}/mine-2.0-py3-none-any.whl", out=tmp_path)
    written = launcher.files(given)
    assert written["mine-2.0-py3-none-any.whl"] == b"wheel" and "mine-2.0" in written["task.yaml"]
    missing = job(*REMOTE, "launch.package=lost.whl")
    assert [problem.what for problem in launcher.problems(missing)] == ["there is no wheel lost.whl here"]


def test_ray_sends_the_package_that_launches_if_it_is_asked_to() -> None:
    assert "py_modules" not in runtime_environment(job().config.launch)
    sent = runtime_environment(job("launch.ray.ship=true").config.launch)["py_modules"]
    assert sent == [str(Path(headway.__file__).parent)]
