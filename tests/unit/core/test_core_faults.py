"""Faults on request happen at their point, at their time, and nowhere else."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import headway
from headway.core.coordination.heartbeat import Phase
from headway.core.errors import ConfigError
from headway.core.process import faults
from headway.core.process.waiting import wait_until
from support.waits import LONG


@pytest.fixture(autouse=True)
def nothing_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_passed", type(faults._passed)())
    monkeypatch.delenv("HEADWAY_FAULTS", raising=False)


def test_without_orders_nothing_happens() -> None:
    assert faults.fault_point("step", 1) is None


def test_a_fault_happens_at_its_count_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_FAULTS", "nan@gradient=1:2")
    assert [faults.fault_point("gradient", 1) for _ in range(4)] == [None, "nan", None, None]


def test_a_fault_happens_at_its_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_FAULTS", "nan@gradient=3, nan@gradient=5:2")
    assert [faults.fault_point("gradient", step) for step in (1, 3, 3, 5, 5)] == [None, "nan", None, None, "nan"]
    assert faults.fault_point("other", 3) is None


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_FAULTS", "enospc@data.shard")
    with pytest.raises(OSError, match=r"data\.shard") as caught:
        faults.fault_point("data.shard")
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize(("action", "number"), [("kill", signal.SIGKILL), ("stop", signal.SIGTERM)])
def test_signals(monkeypatch: pytest.MonkeyPatch, action: str, number: int) -> None:
    monkeypatch.setenv("HEADWAY_FAULTS", f"{action}@step=2")
    code = "from headway.core.process.faults import fault_point as f; f('step', 1)"
    code += "; print('first', flush=True); f('step', 2)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG)
    assert result.returncode == -number
    assert result.stdout == "first\n"


def test_a_hang_is_not_ended_by_who_asks_for_its_stack(tmp_path: Path) -> None:
    """As a warning does, long before the worker that hangs is killed."""
    log, stack = tmp_path / "log", tmp_path / "stack"
    script = (
        "import faulthandler, signal, sys\n"
        "from headway.core.process.faults import fault_point\n"
        "faulthandler.register(signal.SIGURG, file=open(sys.argv[1], 'w'))\n"
        "fault_point('step', 7)\n"
    )
    surroundings = {**os.environ, "HEADWAY_FAULTS": "hang@step=7", "HEADWAY_FAULTS_LOG": str(log)}
    with subprocess.Popen([sys.executable, "-c", script, str(stack)], env=surroundings) as child:
        try:
            assert wait_until(lambda: log.exists() and log.read_text(), LONG)
            for asked in range(1, 4):
                child.send_signal(signal.SIGURG)
                assert wait_until(lambda n=asked: stack.read_text().count("in fault_point") == n, LONG)  # type: ignore[misc]
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(1.0)
        finally:
            child.kill()


@pytest.mark.parametrize(
    "orders",
    [
        "kil@step=3",
        "kill",
        "kill@",
        "kill@step=3:x",
        "kill@step=3:0",
        "nan@gradient,,",
        "nan@step=3",
        "flip@gradient",
        "kill@evaluate=3",
        "kill@checkpoint.shards",
        "kill@replay.x",
        "kill@step",
        "kill@checkpoint.shard=3",
    ],
)
def test_a_mistyped_order_is_refused(monkeypatch: pytest.MonkeyPatch, orders: str) -> None:
    """An order that is silently not carried out would make a test of survival prove nothing."""
    monkeypatch.setenv("HEADWAY_FAULTS", orders)
    with pytest.raises(ConfigError, match="no such fault"):
        faults.fault_point("elsewhere")


def test_the_nearest_point_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nothing passes a point 'checkpoint\.shards'") as told:
        faults.parse_orders("kill@checkpoint.shards:2")
    assert told.value.fix == "did you mean checkpoint.shard?"


def test_points_that_are_known_are_those_that_are_passed() -> None:
    sources = Path(headway.__file__).parent.rglob("*.py")
    passed = {name for path in sources for name in re.findall(r'fault_point\(f?"([a-z.]+)', path.read_text())}
    passed = {name.removesuffix(".").removesuffix(".worker") for name in passed} | {p.name.lower() for p in Phase}
    assert passed == faults.POINTS.keys()
    assert faults.parse_orders("flip@replay.1=3,flip@weights.12=3,kill@communication.worker-1,kill@data=3:2#*%1")
