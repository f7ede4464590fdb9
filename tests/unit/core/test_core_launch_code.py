"""The exit code that a lead leaves for its launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.core.coordination.launch_code import leaving_code, left_code
from headway.core.coordination.launch_variables import CODE_FILE, NODE
from headway.core.errors import ConfigError, Preempted, exit_code_of


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that a launcher asks for."""
    monkeypatch.setenv(CODE_FILE, str(tmp_path / "code"))
    return tmp_path / "code"


ENDS: list[tuple[BaseException | None, int]] = [
    (None, 0), (Preempted("p"), 75), (ConfigError("c"), 2), (KeyboardInterrupt(), 130), (ValueError("v"), 1),
    (SystemExit(3), 3), (SystemExit("words"), 1), (SystemExit(), 0), (OSError(28, "No space left"), 1),
]  # fmt: skip


@pytest.mark.parametrize(("error", "code"), ENDS)
def test_the_lead_leaves_the_code_with_which_it_ends(
    file: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException | None, code: int
) -> None:
    assert exit_code_of(error) == code and left_code() is None
    monkeypatch.setenv("SLURM_PROCID", "0")
    try:
        with leaving_code():
            if error is not None:
                raise error
    except BaseException as raised:
        assert raised is error
    assert file.read_text() == f"{code}\n" and left_code() == code
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("numbers", [{"SLURM_PROCID": "1"}, {}, {NODE: "1", "SLURM_PROCID": "0"}])
def test_other_machines_leave_none(file: Path, monkeypatch: pytest.MonkeyPatch, numbers: dict[str, str]) -> None:
    for name, value in numbers.items():
        monkeypatch.setenv(name, value)
    with leaving_code():
        pass
    assert not file.exists()


def test_without_a_launcher_that_asks_there_is_no_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(CODE_FILE, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "0")
    with leaving_code():
        pass
    assert left_code() is None and not any(tmp_path.iterdir())


def test_a_disk_that_takes_no_code_changes_no_end(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("a file where a folder is wanted")
    monkeypatch.setenv(CODE_FILE, str(file / "code"))
    monkeypatch.setenv("SLURM_PROCID", "0")
    with leaving_code():
        pass
    assert "cannot be left for the launcher" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "x", "-1\n", "256\n", "7" * 100, "7 5\n"])
def test_a_file_that_holds_no_code_is_none(file: Path, text: str) -> None:
    file.write_text(text)
    assert left_code() is None
