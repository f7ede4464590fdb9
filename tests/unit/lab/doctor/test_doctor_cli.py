"""`headway doctor` as people and programs use it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headway.cli.application import application
from headway.core.errors import ConfigError
from headway.core.machine.system import Output, Space
from headway.lab.doctor import examine
from headway.lab.doctor.storage import _write_test
from support.doctor import CLOUD, GIB, H100, LAPTOP, QUERY, Recorded
from support.runs import headway


def on(machine: Recorded, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command line on a recorded machine."""

    def examination(**options: object) -> examine.Examination:
        return machine.examination(folder, **options)

    def run(*arguments: str) -> Result:
        with monkeypatch.context() as patch:
            patch.setattr("headway.lab.cli.doctor.Examination", examination)
            return CliRunner().invoke(application(), ["doctor", *arguments])

    return run


def test_this_machine_without_what_takes_long_to_load(tmp_path: Path) -> None:
    slow = ("torch", "transformers", "datasets", "matplotlib", "pyarrow", "deepspeed")
    script = (
        "import sys; sys.argv = ['headway', 'doctor', '--json']\n"
        "from headway.cli.application import application\n"
        "try: application()()\n"
        "except SystemExit: pass\n"
        f"print(*sys.modules.keys() & {slow}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True)
    result = json.loads(done.stdout)
    assert {"Versions", "Processor", "Memory", "Storage", "Limits"} <= {item["subject"] for item in result["findings"]}
    if not any(item["subject"] == "CUDA" for item in result["findings"]):
        assert done.stderr.split() == []
    assert list(tmp_path.iterdir()) == []


def test_help_has_examples() -> None:
    text = CliRunner().invoke(application(), ["doctor", "-h"]).output
    assert "headway doctor --communication" in text and "Exit codes" in text


def test_only_errors_change_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warned = on(LAPTOP, tmp_path / "a", monkeypatch)()
    assert warned.exit_code == 0 and "WARNING" in warned.output and "0 errors, 4 warnings" in warned.output
    full = LAPTOP.but(spaces={"/": Space(200 * GIB, 0)})
    broken = on(full, tmp_path / "b", monkeypatch)("--json")
    assert broken.exit_code == 1
    assert json.loads(broken.output)["worst"] == "error"


def test_every_setting_of_the_profile_is_shown_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = on(H100, tmp_path, monkeypatch)
    text = run().output
    assert "NCCL_ALGO=^NVLS,NVLSTree,CollNetDirect,CollNetChain  switches add in any order" in text
    assert "left open  NCCL_NVLS_ENABLE: it is for determinism=off" in text
    config = tmp_path / "run.yaml"
    config.write_text(f"name: x\nruns: {tmp_path}/runs\ndata: {{store: /data/s}}\ndeterminism: off\n")
    text = run(str(config)).output
    assert "NCCL_NVLS_ENABLE=2  NVLink switches can reduce" in text and "NCCL_ALGO" not in text
    values = json.loads(run("--json").output)["nccl_profile"]
    assert values["name"] == "nvlink" and all(setting["reason"] for setting in values["settings"])


def test_export_is_shell_and_keeps_what_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_IB_DISABLE", "0")
    result = on(CLOUD, tmp_path, monkeypatch)("--profile", "ethernet", "--export")
    lines = result.output.splitlines()
    assert lines[0] == "# NCCL profile ethernet: asked for"
    assert "# NCCL_IB_DISABLE stays 0, as set in the environment" in lines
    assert any(line.startswith("export NCCL_SOCKET_IFNAME='=ens5'  # ") for line in lines)
    script = f"{result.output}\necho $NCCL_SOCKET_IFNAME $NCCL_NSOCKS_PERTHREAD"
    assert subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout == "=ens5 4\n"


def test_a_profile_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = on(CLOUD, tmp_path, monkeypatch)
    exported = run("--profile", "infiniband", "--export")
    assert isinstance(exported.exception, ConfigError)
    examined = run("--profile", "infiniband", "--json")
    assert examined.exit_code == 1
    assert json.loads(examined.output)["nccl_profile"] is None
    assert "does not fit this machine" in examined.output


def test_a_config_names_folders_and_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(f"name: x\nruns: {tmp_path}/runs\ndata: {{store: /data/s}}\nparallel: {{nccl_profile: none}}\n")
    result = on(CLOUD, tmp_path / "machine", monkeypatch)(str(config))
    assert f"runs ({tmp_path}/runs): 150.0 GiB of 200.0 GiB free" in result.output
    assert "store (/data/s)" in result.output
    assert "none: asked for" in result.output


def test_an_unknown_device_or_size() -> None:
    for arguments, said in [
        (["--device", "tpu"], "there is no device 'tpu'"),
        (["--communication", "--sizes", "64Qi"], "'64Qi' is not"),
        (["--communication", "--sizes", "2"], "at least one number"),
        (["--communication", "--workers", "1", "--device", "cpu"], "two are needed"),
    ]:
        result = CliRunner().invoke(application(), ["doctor", *arguments])
        assert isinstance(result.exception, ConfigError) and said in result.exception.what


def test_gpu_trouble_reaches_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = CLOUD.but(commands={QUERY: Output("silent")})
    result = on(hanging, tmp_path, monkeypatch)()
    assert result.exit_code == 1 and "run:  sudo dmesg" in result.output


def test_the_write_test_leaves_nothing(tmp_path: Path) -> None:
    finding = _write_test(tmp_path, "runs")
    assert finding.level in ("ok", "warning") and "64.0 MiB written and synced" in finding.what
    assert list(tmp_path.iterdir()) == []
    assert _write_test(tmp_path / "gone", "runs").level == "error"


def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    result = headway("doctor", "--json", cwd=tmp_path)
    tmp_path.chmod(0o700)
    assert result.returncode == 1 and "you may not write there" in result.stdout
