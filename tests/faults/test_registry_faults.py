"""A registry whose writers are killed: nothing is half registered, no number is given twice, the command completes."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headway.cli.main import _run as run_command_line
from headway.core.errors import HeadwayError
from headway.core.files.hashes import fingerprint
from headway.models.versions import Registry, local_folder, open_registry, resolve
from headway.registry.aliases import next_change, put_change
from headway.registry.pull import pull_to
from headway.registry.verify import verify_model
from support.object_storage import S3Server
from support.registry import add, write_model
from support.runs import headway, headway_in_copy


@pytest.mark.parametrize("fault", ["kill@registry.file", "kill@registry.file:3", "kill@registry.version"])
def test_a_killed_registration_is_invisible_and_completed(tmp_path: Path, fault: str) -> None:
    place = str(tmp_path / "registry")
    words = ["registry", "add", str(write_model(tmp_path / "model")), "--name", "model", "--registry", place]
    assert headway(*words, faults=fault).returncode == -signal.SIGKILL
    registry = open_registry(place)
    assert registry.numbers("model") == [] and registry.newest("model") is None
    assert [finding.kind for finding in verify_model(registry, "model")] == ["leftover"]
    listed = headway("registry", "verify", "--registry", place)
    assert listed.returncode == 0 and "leftover" in listed.stdout
    assert headway(*words).returncode == 0
    assert registry.numbers("model") == [1] and list(verify_model(registry, "model")) == []
    assert headway(*words).returncode == 0
    assert registry.numbers("model") == [1]


def test_a_full_disk_registers_nothing(tmp_path: Path) -> None:
    words = [
        "registry",
        "add",
        str(write_model(tmp_path / "model")),
        "--name",
        "model",
        "--registry",
        str(tmp_path / "r"),
    ]
    done = headway(*words, faults="enospc@registry.version")
    assert done.returncode != 0 and "error:" in done.stderr and "Traceback" not in done.stderr
    assert open_registry(tmp_path / "r").numbers("model") == []


def test_an_alias_is_changed_whole_or_not_at_all(tmp_path: Path) -> None:
    registry = open_registry(tmp_path / "registry")
    add(registry, write_model(tmp_path / "a", 1))
    add(registry, write_model(tmp_path / "b", 2))
    put_change(registry, next_change(None, "model", "candidate", registry.required("model", 1)))
    words = ["registry", "alias", "model@2", "candidate", "--registry", str(tmp_path / "registry")]
    assert headway(*words, faults="kill@registry.alias").returncode == -signal.SIGKILL
    assert resolve("model@candidate", registry).number == 1
    assert headway(*words).returncode == 0
    assert resolve("model@candidate", registry).number == 2


def _check(registry: Registry, most: int) -> None:
    """Whatever was killed: what is visible is whole, and numbers are without gaps."""
    findings = list(verify_model(registry, "model"))
    assert all(finding.kind == "leftover" for finding in findings), findings
    numbers = registry.numbers("model")
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) <= most
    change = registry.present("model", "candidate")
    assert change is None or local_folder(resolve("model@candidate", registry)).is_dir()


def _start(words: list[str]) -> int:
    """Run the command line in a copy of this process, so that kills fall into its work and not into its imports."""
    copy = os.fork()
    if copy:
        return copy
    code = 99
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):
            os.dup2(nothing, number)
        sys.argv = ["headway", *words]
        code = run_command_line() or 0
    finally:
        os._exit(code)


def _killed_at_random(place: str, folder: Path, kills: int) -> None:
    """Kill the commands `add` and `alias` in turn, check, and let the same commands complete."""
    draw, registry = random.Random(50), open_registry(place)
    took: dict[str, float] = {}
    killed = 0
    for number in range(1, kills // 2 + 2):
        model = write_model(folder / f"model-{number}", number, **{"merges.txt": draw.randbytes(3_000_000)})
        commands = {
            "add": ["registry", "add", str(model), "--name", "model", "--registry", place],
            "alias": ["registry", "alias", f"model@{number}", "candidate", "--registry", place],
        }
        for verb, words in commands.items():
            if verb in took:
                copy = _start(words)
                time.sleep(draw.uniform(0.0, took[verb]))
                os.kill(copy, signal.SIGKILL)
                killed += os.WIFSIGNALED(os.waitpid(copy, 0)[1])
                _check(registry, number)
            began = time.monotonic()
            assert os.waitstatus_to_exitcode(os.waitpid(_start(words), 0)[1]) == 0
            took[verb] = time.monotonic() - began
            _check(registry, number)
        assert registry.numbers("model")[-1] == number == resolve("model@candidate", registry).number
    assert list(verify_model(registry, "model")) == [], "the same commands have completed everything"
    assert killed > 0, "some kills fall into the work"


def test_a_registry_survives_kills_at_some_moments(tmp_path: Path) -> None:
    _killed_at_random(str(tmp_path / "registry"), tmp_path, kills=6)


@pytest.mark.slow
def test_a_registry_survives_kills_at_fifty_moments(tmp_path: Path) -> None:
    _killed_at_random(str(tmp_path / "registry"), tmp_path, kills=50)


@pytest.mark.slow
def test_a_store_survives_kills_at_fifty_moments(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _killed_at_random(f"{s3.url}/{tmp_path.name}-{random.randbytes(4).hex()}", tmp_path, kills=50)


def test_processes_at_once_get_different_numbers(tmp_path: Path) -> None:
    place = str(tmp_path / "registry")
    models = [write_model(tmp_path / str(seed), seed) for seed in range(4)]

    def run(model: Path) -> int:
        return headway("registry", "add", str(model), "--name", "model", "--registry", place).returncode

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, models)) == [0] * 4
    registry = open_registry(place)
    assert registry.numbers("model") == [1, 2, 3, 4] and list(verify_model(registry, "model")) == []


def _stray_file(folder: Path) -> None:
    (folder / "README.md").write_text("about this registry", encoding="utf-8")
    (folder / "notes").mkdir()


def _pipe(folder: Path) -> None:
    record = folder / "model/versions/00000001.json"
    record.unlink()
    os.mkfifo(record)


def _giant(folder: Path) -> None:
    os.truncate(folder / "model/versions/00000001.json", 10 * 2**30)


def _deep(folder: Path) -> None:
    (folder / "model/versions/00000001.json").write_bytes(b"[" * 10_000_000)


def _pickle(folder: Path) -> None:
    (folder / "model/versions/00000001.json").write_bytes(pickle.dumps(os.system))


def _folder(folder: Path) -> None:
    record = folder / "model/versions/00000001.json"
    record.unlink()
    record.mkdir()


def _escape(folder: Path) -> None:
    record = folder / "model/versions/00000001.json"
    plain = json.loads(record.read_bytes())
    plain["files"]["../../../../outside.txt"] = plain["files"].pop("config.json")
    del plain["sha256"]
    record.write_text(json.dumps({**plain, "sha256": fingerprint(plain)}), encoding="utf-8")


def _loop(folder: Path) -> None:
    weights = next((folder / "model/files").glob("*/model.safetensors"))
    weights.unlink()
    weights.symlink_to(weights.name)


def _pipe_for_weights(folder: Path) -> None:
    weights = next((folder / "model/files").glob("*/model.safetensors"))
    weights.unlink()
    os.mkfifo(weights)


@pytest.mark.parametrize(
    "harm", [_stray_file, _pipe, _giant, _deep, _pickle, _folder, _escape, _loop, _pipe_for_weights]
)
def test_a_hostile_registry_is_found_and_costs_nothing(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    """No reader waits, fills memory, follows a path out of it, or unpickles; `verify` names what was done."""
    registry = open_registry(tmp_path / "registry")
    add(registry, write_model(tmp_path / "a", 1))
    put_change(registry, next_change(None, "model", "prod", registry.required("model", 1)))
    harm(tmp_path / "registry")
    code, said = headway_in_copy("registry", "verify", "--registry", str(tmp_path / "registry"), gib=1.0)
    assert "Traceback" not in said
    if harm is _stray_file:
        assert code == 0, said
        return
    assert code == 4 and "damage: model@1" in said, said
    code, said = headway_in_copy("registry", "list", "--registry", str(tmp_path / "registry"))
    assert code == 0 and "Traceback" not in said, said
    with pytest.raises(HeadwayError):
        local_folder(resolve("model@prod", registry))
    with pytest.raises(HeadwayError):
        pull_to(resolve("model@1", registry), tmp_path / "pulled" / "model")
    assert not (tmp_path / "pulled" / "model").exists() and not (tmp_path / "outside.txt").exists()
