"""Two machines without a common disk: each is lost with its own, and the run ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from headway.checkpoint.remote.open import place_of
from headway.core.process.table import process_state
from headway.core.process.waiting import wait_until
from headway.run.directory.ledger import Ledger
from support.machines import wait_for_steps
from support.object_storage import S3Server, SeaweedFs
from support.parts_table import SEAWEEDFS
from support.ports import free_ports
from support.runs import PATIENT_HEADWAY, headway, state_hash
from support.waits import LONG

pytestmark = pytest.mark.slow
STEPS = 8


@dataclass
class Machine:
    """A folder that nobody else uses, and the command that runs there."""

    folder: Path
    process: subprocess.Popen[str]

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "apart"

    def lose(self) -> None:
        """Kill all of its processes, and lose its disk."""
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if Path(process.cwd()).is_relative_to(self.folder):
                    process.send_signal(signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.folder)

    def end(self) -> str:
        """Wait for its command, and return what it has printed."""
        return self.process.communicate(timeout=LONG)[1]


@pytest.fixture
def start(tiny: Callable[..., Path], tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    """Start a machine with the remote tier at a URL."""
    port = free_ports(1)[0]

    with ExitStack() as stack:

        def begin(url: str, number: int, name: str, faults: str = "") -> Machine:
            config = tiny(
                train={"steps": STEPS},
                checkpoint={"remote": {"url": url}},
                cost={"usd_per_hour": 36.0},
                supervise={"hang_seconds": 290.0},
            )
            return stack.enter_context(_machine(tmp_path / name, config, number, port, faults))

        yield begin


@contextmanager
def _machine(folder: Path, config: Path, number: int, port: int, faults: str) -> Iterator[Machine]:
    folder.mkdir()
    # A worker that has stopped itself is left alone until its machine is lost.
    command = [*PATIENT_HEADWAY, "train", str(config), "name=apart", "runs=runs", "--machines", "2"]
    command += ["--node", str(number), "--lead", f"127.0.0.1:{port}"]
    environment = {**os.environ, "HEADWAY_SECRET": "0123456789abcdef", "HEADWAY_FAULTS": faults}
    process = subprocess.Popen(command, cwd=folder, text=True, stderr=subprocess.PIPE, env=environment)
    machine = Machine(folder, process)
    try:
        yield machine
    finally:
        if folder.exists():
            machine.lose()


def spent(run: Path) -> float:
    """The dollars of the newest step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["cost/spent_usd"] for line in lines if "cost/spent_usd" in line][-1]


def test_the_lead_and_then_the_other_machine_are_lost_with_their_disks(
    start: Callable[..., Machine], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "tier").mkdir()
    lose_both(f"file://{tmp_path}/tier", start, tiny, tmp_path)


@pytest.mark.parts(SEAWEEDFS)
@pytest.mark.parametrize("s3_server", [SeaweedFs], indirect=True)
def test_both_are_lost_and_the_run_continues_from_an_object_store(
    start: Callable[..., Machine], tiny: Callable[..., Path], tmp_path: Path, s3: S3Server
) -> None:
    lose_both(f"{s3.url}/{tmp_path.name}", start, tiny, tmp_path)


def lose_both(url: str, start: Callable[..., Machine], tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Lose the lead, then the other machine, each with its disk; the run ends in the state of a whole one."""
    first, other = start(url, 0, "a", "freeze@step=5%0"), start(url, 1, "b")
    _stopped_at(first)
    # What is lost before it is published is trained again, as ever; this is about what was published.
    # Of two that wait, the newer one is sent.
    place = place_of({"url": url}, "apart").at("run-001")
    sent = [f"step-0000000{step}/manifest.json" for step in (2, 4)]
    assert wait_until(lambda: any(place.stat(name) for name in sent), LONG, 0.5), first.process.poll()
    before = spent(first.run)
    first.lose()

    # The lead starts on an empty disk elsewhere; later the other machine is lost, and replaced by an empty one.
    began = time.monotonic()
    lead = start(url, 0, "c", "freeze@step=7%0")
    frozen = _stopped_at(lead)
    print(f"lead elsewhere: at step 7 after {time.monotonic() - began:.1f} s")
    assert wait_until(lambda: place.stat("step-00000006/manifest.json") is not None, LONG, 0.5), "it sends on"
    assert [path.name for path in sorted((lead.run / "attempts").iterdir())] == ["001", "002"], "the numbers continue"
    began = time.monotonic()
    other.lose()
    assert wait_until(lambda: _has_ended(frozen), LONG), "the lead ends its workers"
    replaced = start(url, 1, "d")
    wait_for_steps(lead.run, 1)
    print(f"other machine replaced: next step after {time.monotonic() - began:.1f} s")
    said, said_there = lead.end(), replaced.end()
    assert (lead.process.returncode, replaced.process.returncode) == (0, 0), said + said_there
    assert "machines share no folder" in said and "ledger, metrics and account of the run continue from" in said
    assert "machine 1 (" in said and "is lost" in said

    assert headway("train", tiny(train={"steps": STEPS}), "name=whole", "--workers", "2").returncode == 0
    assert state_hash(lead.run) == state_hash(tmp_path / "runs" / "whole")
    proof = headway("ledger", lead.run)
    assert proof.returncode == 0 and f"proven for steps 0 to {STEPS - 1}, {8 * STEPS} rows" in proof.stdout, (
        proof.stdout
    )
    assert {commit.attempt for commit in Ledger(lead.run / "ledger.jsonl").commits()} == {1, 2, 3}
    assert spent(lead.run) > before > 0
    steps = {json.loads(line).get("step") for line in (lead.run / "metrics.jsonl").read_text().splitlines()}
    assert steps >= set(range(1, STEPS + 1)), "curves go on"
    assert not (lead.run / ".machine-1").exists() and not list(lead.run.rglob("*worker-1.log"))


def _stopped_at(machine: Machine) -> int:
    """The process of a machine's worker, once it has stopped itself."""
    found: list[int] = []

    def has_stopped() -> bool:
        assert machine.process.poll() is None, machine.process.communicate()[1]
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.status() == psutil.STATUS_STOPPED and Path(process.cwd()).is_relative_to(machine.folder):
                    found.append(process.pid)
        return bool(found)

    assert wait_until(has_stopped, LONG, 0.2), "it was to stop itself"
    return found[0]


def _has_ended(pid: int) -> bool:
    """Whether a process has ended; the lead may ask for its exit code only when it starts the next one."""
    found = process_state(pid)
    return found is None or found.state == "Z"


def test_without_a_remote_tier_the_run_is_refused_before_anything_begins(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, port = tiny(train={"steps": STEPS}), free_ports(1)[0]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(":")]))
    # A network file system may take a minute to show a file; this one need not be waited for.
    (tmp_path / "sitecustomize.py").write_text(
        "from headway.run.supervisor.machines import shared_disk; folders.VISIBILITY_TIMEOUT = 1.0\n"
    )
    with (
        _machine(tmp_path / "a", config, 0, port, "") as lead,
        _machine(tmp_path / "b", config, 1, port, "") as other,
    ):
        said, said_there = lead.end(), other.end()
        assert (lead.process.returncode, other.process.returncode) == (2, 2), said + said_there
        assert "machine 1 (" in said and "does not see the folder of the run, and there is no remote tier" in said
        assert "checkpoint.remote.url" in said_there
        assert not lead.run.exists() and not list((tmp_path / "b").rglob("*.log"))
