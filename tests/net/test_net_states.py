"""Runs end in the states that were recorded for this kind of processor, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import headway as package
from net.runs import (
    RECORDED_STATES,
    RUNS,
    kept_copy,
    newest_checkpoint,
    processor,
    state_name,
    train,
    write_run_config,
)

NAMES = [pytest.param(name, marks=[pytest.mark.slow] if run.slow else []) for name, run in RUNS.items()]


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Trains each run once and returns the name of its state, computed from the files."""
    known: dict[str, str] = {}

    def find(name: str) -> str:
        if name not in known:
            checkpoint = train(tmp_path_factory.mktemp(name), name)
            known[name] = state_name(checkpoint)
            manifest = json.loads((checkpoint / "manifest.json").read_text())
            assert manifest["state_sha256"] == known[name], f"{name}: the manifest names another state"
        return known[name]

    return find


@pytest.mark.parametrize("name", NAMES)
def test_a_run_ends_in_the_recorded_state(name: str, state: Callable[[str], str]) -> None:
    """Where nothing is recorded for the processor, the state is still the one of the run that promises the same."""
    if name == "deepspeed":
        pytest.importorskip("deepspeed")
    promised, kind = RUNS[name].same_as or name, processor()
    record: dict[str, str] = json.loads(RECORDED_STATES.read_text()).get(kind, {})
    found = state(name)
    if promised in record:
        assert found == record[promised], f"{name}: not the state recorded for {kind}"
        return
    assert found == state(promised)
    pytest.skip(f"no state of {promised} is recorded for {kind}: cd tests && python -m net states")


def test_training_from_python_gives_the_state_of_the_command(
    state: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_run_config(tmp_path, "single")
    monkeypatch.chdir(tmp_path)
    run = package.train(package.load_config(config, ["supervise.enabled=false"]))
    assert state_name(newest_checkpoint(run.directory)) == state("single")
    assert run.step == 4 and run.loss is not None


def test_a_state_is_named_by_every_element_and_by_the_cursor(tmp_path: Path) -> None:
    """Other bits in a tensor, or in the cursor, give another name; another layout of the file does not."""
    checkpoint = newest_checkpoint(kept_copy(tmp_path) / "trained" / "earlier")
    name = state_name(checkpoint)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert name == manifest["state_sha256"]
    assert any(len(tensor["slices"]) > 1 for tensor in manifest["tensors"].values())
    shard = next(checkpoint.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert state_name(checkpoint) != name
    content[-1] ^= 1
    shard.write_bytes(content)
    assert state_name(checkpoint) == name
    manifest["cursor"]["skipped_steps"] += 1
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    assert state_name(checkpoint) != name
