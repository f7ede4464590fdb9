"""The bill of materials of a wheel: complete, with versions and licences of this environment, and reproducible."""

from __future__ import annotations

import email
import hashlib
import json
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headway.cli.application import application
from headway.clouds.supply.sbom import installed_closure, licence_of, needed, normal_name, wheel_sbom
from headway.core.errors import ConfigError


def make_wheel(folder: Path, *requirements: str) -> Path:
    """A wheel of nothing but metadata."""
    file = folder / "my_lab-0.2.0-py3-none-any.whl"
    lines = ["Metadata-Version: 2.4", "Name: my_lab", "Version: 0.2.0", "License-Expression: MIT"]
    lines += [f"Requires-Dist: {one}" for one in requirements]
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo("my_lab-0.2.0.dist-info/METADATA"), "\n".join([*lines, "", ""]))
    return file


def test_everything_that_a_wheel_leads_to_is_listed_once(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "rich>=13", 'pywin32; sys_platform == "win32"', 'numpy; extra == "fast"')
    found = wheel_sbom(wheel)
    # By hand: rich needs markdown-it-py and pygments, and markdown-it-py needs mdurl.
    assert [one["name"] for one in found["components"]] == ["markdown-it-py", "mdurl", "pygments", "rich"]
    versions = {one["name"]: one["version"] for one in found["components"]}
    assert versions == {name: metadata.version(name) for name in versions}
    graph = {one["ref"]: one["dependsOn"] for one in found["dependencies"]}
    assert graph["pkg:pypi/my-lab@0.2.0"] == [f"pkg:pypi/rich@{versions['rich']}"]
    assert graph[f"pkg:pypi/markdown-it-py@{versions['markdown-it-py']}"] == [f"pkg:pypi/mdurl@{versions['mdurl']}"]
    itself = found["metadata"]["component"]
    assert itself["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}]
    assert itself["licenses"] == [{"license": {"name": "MIT"}}]
    with_extra = wheel_sbom(wheel, ["fast"])
    assert {one["name"] for one in with_extra["components"]} == {*versions, "numpy"}


def test_equal_wheels_give_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(tmp_path, "rich")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    outputs = [tmp_path / name for name in ("a.json", "b.json")]
    for output in outputs:
        done = CliRunner().invoke(application(["sbom"]), ["sbom", str(wheel), "-o", str(output)])
        assert done.exit_code == 0, done.output
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    assert json.loads(outputs[0].read_text(encoding="utf-8"))["metadata"]["timestamp"] == "2023-11-14T22:13:20Z"
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    assert "timestamp" not in wheel_sbom(wheel)["metadata"]


def test_a_package_that_is_missing_is_no_guess(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no-such-package is not installed"):
        wheel_sbom(make_wheel(tmp_path, "No_Such.Package"))


def test_what_is_no_wheel_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.whl"
    for content in (b"", b"PK\x03\x04 torn"):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="no wheel"):
            wheel_sbom(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x-1.dist-info/METADATA", "Name: x\n\n")
    with pytest.raises(ConfigError, match="no version"):
        wheel_sbom(file)


def test_extras_of_a_requirement_are_followed() -> None:
    assert needed(["fsspec[http]>=1", 'a; extra == "x"'], ["x"]) == [("fsspec", ("http",)), ("a", ())]
    plain = {one.name for one in installed_closure(["fsspec"])}
    assert {one.name for one in installed_closure(["fsspec[http]"])} > plain == {"fsspec"}


def test_a_licence_is_found_wherever_a_package_says_it() -> None:
    def licence(text: str) -> str | None:
        return licence_of(email.message_from_string(text + "\n\n"))

    assert licence("License-Expression: MIT OR Apache-2.0\nLicense: text") == "MIT OR Apache-2.0"
    assert licence("Classifier: License :: OSI Approved :: BSD License") == "BSD License"
    assert licence("License: MIT\n        and a long text") == "MIT"
    assert licence("Name: x") is None
    assert normal_name("My_Lab.Tools") == "my-lab-tools"
