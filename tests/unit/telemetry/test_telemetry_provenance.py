"""run.json: enough to know what ran, and nothing that is private."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from headway.telemetry import provenance as module
from headway.telemetry.provenance import DIFF_FILE, GitDiff, environment, git_state, provenance


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=T", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
    command = ["git", *identity, "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init")
    (folder / "a.txt").write_text("one\n")
    git(folder, "add", "a.txt")
    git(folder, "commit", "-m", "first")
    return folder


def test_a_clean_repository(repository: Path) -> None:
    state = git_state(repository, "full")
    assert state is not None
    assert state["commit"] == git(repository, "rev-parse", "HEAD").strip()
    assert state["branch"] == "main" and state["dirty"] is False and "diff" not in state


def test_uncommitted_changes_are_kept_and_hashed(repository: Path) -> None:
    (repository / "a.txt").write_text("two\n")
    (repository / "new.txt").write_text("new\n")
    state = git_state(repository, "full")
    assert state is not None and state["dirty"] is True
    assert "-one\n+two\n" in state["diff"] and state["untracked"] == ["new.txt"]
    assert state["diff_sha256"] == hashlib.sha256(state["diff"].encode()).hexdigest()


@pytest.mark.parametrize("wanted", ["none", "local", "full"])
def test_where_changes_are_kept(repository: Path, tmp_path: Path, wanted: GitDiff) -> None:
    (repository / "a.txt").write_text("url = 'https://me:abc123@example.org'\n")
    (repository / "new.txt").write_text("new\n")
    attempt = tmp_path / "attempts" / "001"
    attempt.mkdir(parents=True)
    state = git_state(repository, wanted, attempt)
    assert state is not None and state["dirty"] is True
    if wanted == "none":
        assert state.keys() == {"commit", "branch", "dirty"} and not any(attempt.iterdir())
        return
    kept = tmp_path / state["diff_file"]
    assert "+url = 'https://me:abc123@example.org'\n" in kept.read_text() and kept.stat().st_mode & 0o777 == 0o600
    assert state["diff_sha256"] == hashlib.sha256(kept.read_bytes()).hexdigest()
    assert state["changed"] == ["a.txt"] and state["untracked"] == ["new.txt"]
    assert ("+url = 'https://***@example.org'\n" in state.get("diff", "")) is (wanted == "full")


def test_a_huge_diff_is_cut_but_hashed_whole(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / "a.txt").write_text("word\n" * 1000)
    whole = git_state(repository, "full")
    monkeypatch.setattr(module, "_TEXT_BYTES", 100)
    monkeypatch.setattr(module, "_FILE_BYTES", 1000)
    state = git_state(repository, "full", tmp_path)
    assert whole is not None and state is not None
    assert len(state["diff"]) == 100 and state["diff_bytes"] == len(whole["diff"])
    assert state["diff_sha256"] == whole["diff_sha256"]
    assert "diff_file" not in state and not (tmp_path / DIFF_FILE).exists()


def test_the_diff_can_be_applied_to_the_commit(repository: Path, tmp_path: Path) -> None:
    (repository / "a.txt").write_bytes(b"\0binary\n")
    assert git_state(repository, "local", tmp_path) is not None
    git(repository, "checkout", "a.txt")
    git(repository, "apply", str(tmp_path / DIFF_FILE))
    assert (repository / "a.txt").read_bytes() == b"\0binary\n"


def test_a_repository_without_a_commit(tmp_path: Path) -> None:
    git(tmp_path, "init")
    (tmp_path / "a.txt").write_text("one\n")
    state = git_state(tmp_path)
    assert state is not None and state["commit"] is None and state["dirty"] is True


def test_a_configured_diff_tool_is_not_run(repository: Path, tmp_path: Path) -> None:
    git(repository, "config", "diff.external", f"touch {tmp_path / 'ran'}")
    (repository / "a.txt").write_text("two\n")
    state = git_state(repository, "full")
    assert state is not None and "+two" in state["diff"]
    assert not (tmp_path / "ran").exists()


def test_no_repository_and_no_git_are_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None


def test_only_allowed_variables_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"OMP_NUM_THREADS": "3", "NCCL_DEBUG": "INFO", "HEADWAY_FAULTS": "x", "TOKENIZERS_PARALLELISM": "0"}
    kept = {"AWS_SECRET_ACCESS_KEY": "s1", "HF_TOKEN": "s2", "HEADWAY_API_KEY": "s3", "TORCH_AUTH_TOKEN": "s4"}
    kept |= {"NCCL_VAULT": "s5", "CUDA_LICENCE": "s6", "HEADWAY_DEPLOY": "s7", "OMP_NUM_THREADS_2": "s8"}
    for name, value in {**told, **kept}.items():
        monkeypatch.setenv(name, value)
    variables = environment()["variables"]
    assert told.items() <= variables.items()
    assert not kept.keys() & variables.keys()


def test_what_is_recorded_is_redacted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VERSION", "https://me:abc123@example.org/12")
    command = ["headway", "train", "a.yaml", "data.remote_options.secret=abc123"]
    monkeypatch.chdir(tmp_path)
    record = provenance(command=command, config_fingerprint="c", fingerprints={}, model={})
    assert record["environment"]["variables"]["CUDA_VERSION"] == "https://***@example.org/12"
    assert record["command"][-1] == "data.remote_options.secret=***"


def test_the_whole_record_is_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    record = provenance(
        command=["headway", "train", "a.yaml"],
        config_fingerprint="c",
        fingerprints={"data": "d", "tokenizer": "t"},
        model={"parameters": 5},
    )
    assert json.loads(json.dumps(record)) == record
    assert record["fingerprints"] == {"config": "c", "data": "d", "tokenizer": "t"}
    assert record["folder"] == str(tmp_path) and record["model"] == {"parameters": 5}
    assert {"torch", "numpy"} <= record["environment"]["packages"].keys()
    assert record["hardware"]["cpu"]
