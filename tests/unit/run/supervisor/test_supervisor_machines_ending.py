"""What a machine that finds no lead knows of a run that has ended."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.config import Config, load_config, resolve
from headway.core.coordination.launch_variables import CODE_FILE
from headway.core.errors import Cancelled, CheckpointError, ConfigError, Preempted
from headway.core.files.hashes import fingerprint
from headway.run.directory.run_directory import IDENTITY_KEY
from headway.run.supervisor.machines import node as machines_node
from headway.run.supervisor.machines.ending import ANY_TIME, is_finished_in_tier, raise_end, recorded_end
from headway.run.supervisor.machines.lead_connection import LeadStatus
from headway.run.supervisor.machines.machine_role import MachineRole, Membership
from headway.run.supervisor.machines.messages import RunEnd
from headway.run.supervisor.machines.node import _Node
from support.runs import headway

COMPUTES = {"seed": 3}
IDENTITY = fingerprint(COMPUTES)


@pytest.fixture
def finished(tiny: Callable[..., Path], tmp_path: Path) -> Callable[..., Config]:
    """A finished run, as several machines leave it; called with overrides it returns its config."""
    config = tiny(train={"steps": 2}, checkpoint={"remote": {"url": f"file://{tmp_path}/remote"}})
    (tmp_path / "remote").mkdir()
    done = headway("train", config)
    assert done.returncode == 0, done.stderr
    change_record(tmp_path, **{IDENTITY_KEY: IDENTITY})
    return lambda *overrides: resolve(load_config(config, [*overrides]))


def change_record(folder: Path, **facts: Any) -> None:
    (path,) = folder.glob("runs/tiny/attempts/*/attempt.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))


def test_a_finished_run_is_finished_for_the_same_config_only(finished: Callable[..., Config], tmp_path: Path) -> None:
    assert recorded_end(finished(), IDENTITY, time.time()) == RunEnd(0), "whenever it was"
    assert recorded_end(finished("train.steps=4"), IDENTITY, ANY_TIME) is None, "more steps are wanted now"
    assert recorded_end(finished(), "another one", ANY_TIME) is None
    assert recorded_end(finished("name=other"), IDENTITY, ANY_TIME) is None
    (shard,) = tmp_path.glob("runs/tiny/checkpoints/step-00000002/*.safetensors")
    ledger = tmp_path / "runs/tiny/ledger.jsonl"
    kept = ledger.read_bytes()
    ledger.write_bytes(b"no ledger")
    assert recorded_end(finished(), IDENTITY, ANY_TIME) is None, "whoever trains reports that"
    ledger.write_bytes(kept)
    assert recorded_end(finished(), IDENTITY, ANY_TIME) == RunEnd(0)
    shard.unlink()
    assert recorded_end(finished(), IDENTITY, ANY_TIME) is None, "an attempt has to make its last checkpoint again"


@pytest.mark.parametrize(("code", "kind"), [(2, ConfigError), (4, CheckpointError), (7, Cancelled)])
def test_a_final_error_counts_if_no_start_came_after_it(
    finished: Callable[..., Config], tmp_path: Path, code: int, kind: type[Exception]
) -> None:
    change_record(tmp_path, outcome="what went wrong", exit_code=code, ended=1000.0, where="there", fix="mend it")
    told = RunEnd(code, "what went wrong", "there", "mend it")
    assert recorded_end(finished(), IDENTITY, 999.0) == told
    assert recorded_end(finished(), IDENTITY, ANY_TIME) == told
    assert recorded_end(finished(), IDENTITY, 1001.0) is None, "a lead may come that has no such error"
    with pytest.raises(kind, match="what went wrong"):
        raise_end(told)


@pytest.mark.parametrize("facts", [{"exit_code": 75}, {"exit_code": 1}, {"exit_code": None}, {"exit_code": "x"},
                                   {"exit_code": 4, "ended": "yesterday"}])  # fmt: skip
def test_a_run_that_continues_has_not_ended(
    finished: Callable[..., Config], tmp_path: Path, facts: dict[str, Any]
) -> None:
    change_record(tmp_path, outcome="no matter what", **facts)
    assert recorded_end(finished(), IDENTITY, ANY_TIME) is None


def test_the_code_that_the_lead_has_left_is_the_end(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CODE_FILE, str(tmp_path / "code"))
    config = load_config(tiny())
    assert recorded_end(config, IDENTITY, ANY_TIME) is None
    (tmp_path / "code").write_text("2\n")
    end = recorded_end(config, IDENTITY, time.time())
    assert end is not None and end.exit_code == 2


def test_a_machine_that_sees_no_run_directory_asks_the_remote_tier(
    finished: Callable[..., Config], tmp_path: Path
) -> None:
    assert not is_finished_in_tier(finished()), "its own record is nearer"
    shutil.rmtree(tmp_path / "runs")
    assert is_finished_in_tier(finished())
    assert not is_finished_in_tier(finished("train.steps=4"))
    assert not is_finished_in_tier(finished("seed=4")), "the tier is another run's"
    assert not is_finished_in_tier(finished(f"data.store={tmp_path}/none"))
    shutil.rmtree(tmp_path / "remote")
    assert not is_finished_in_tier(finished())


def lone_node(config: Config, monkeypatch: pytest.MonkeyPatch, gone: float, **options: Any) -> Callable[[], bool]:
    """A machine whose lead has been gone for some seconds; returns its next look."""
    role = MachineRole(1, "head", 7000, b"x" * 16, options.pop("is_restarted", True))
    starts_over = options.pop("starts_over", False)
    node = _Node(config, Membership(role, COMPUTES), own_process=False, starts_over=starts_over)
    now = time.monotonic()
    if node._end_without_lead is not None:
        node._end_without_lead._look_at = 0.0
    about = {"session": 1, "is_absent": True, **options}
    line: Any = SimpleNamespace(status=LeadStatus(lost_at=now - gone, **about))
    monkeypatch.setattr(machines_node, "time", SimpleNamespace(monotonic=lambda: now, time=time.time))
    return lambda: node._wait_for_lead(line)


def test_a_late_machine_of_a_finished_run_ends_with_0(
    finished: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    look = lone_node(finished(), monkeypatch, gone=1.0)
    assert look() is True
    assert lone_node(finished(), monkeypatch, gone=1.0, starts_over=True)() is False, "that run does not count"
    shutil.rmtree(tmp_path / "runs")
    assert lone_node(finished(), monkeypatch, gone=1.0)() is False, "the tier is asked later"
    assert lone_node(finished(), monkeypatch, gone=100.0)() is True


def test_a_machine_gives_up_with_the_error_that_its_lead_met(
    finished: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    change_record(tmp_path, outcome="cancelled", exit_code=7, ended=time.time() - 3600.0)
    assert lone_node(finished(), monkeypatch, gone=599.0)() is False
    with pytest.raises(Cancelled):
        lone_node(finished(), monkeypatch, gone=600.0)()
    change_record(tmp_path, exit_code=75)
    with pytest.raises(Preempted, match="the lead has been gone for 10 m 0 s"):
        lone_node(finished(), monkeypatch, gone=600.0)()
    change_record(tmp_path, exit_code=7, ended=time.time() + 60.0)
    with pytest.raises(Cancelled):
        lone_node(finished(), monkeypatch, gone=1.0)()


@pytest.mark.parametrize(
    ("gone", "options", "gives_up"),
    [
        (16.0, {}, True),
        (14.0, {}, False),
        (16.0, {"session": 0}, False),  # it may still be starting
        (16.0, {"is_absent": False}, False),  # its machine does not answer, as behind a cut cable
        (16.0, {"is_restarted": True}, False),
    ],
)
def test_a_lead_that_nothing_starts_again_is_not_waited_for(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, gone: float, options: dict[str, Any], gives_up: bool
) -> None:
    look = lone_node(load_config(tiny()), monkeypatch, gone, **{"is_restarted": False, **options})
    if gives_up:
        with pytest.raises(Preempted, match="the lead's command has ended, and nothing starts it again"):
            look()
    else:
        assert look() is False
