"""Two runs that are told the same URL and name, and a run whose claims are removed while it trains."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from headway.checkpoint.remote.objects import Objects
from headway.checkpoint.remote.ownership import read_claim
from headway.checkpoint.remote.tier import RemoteTier
from headway.checkpoint.transfer import remote_manifests
from headway.core.coordination.heartbeat import read_heartbeat
from headway.core.process.table import STOPPED, process_state
from headway.core.process.waiting import wait_until
from headway.run.directory.ledger_proof import prove
from headway.telemetry.metrics import read_metrics
from support.object_storage import S3Server
from support.runs import headway, state_hash

Tiny = Callable[..., Path]
STEPS = 6


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def killed(tiny: Tiny, tmp_path: Path) -> Path:
    """The config of two runs in folders of their own, of which the first has claimed the place that both are told, and
    was killed after its first save, before it sent anything."""
    (tmp_path / "remote").mkdir()
    remote = {"url": f"file://{tmp_path}/remote"}
    config = tiny(train={"steps": STEPS}, checkpoint={"every": "2 steps", "remote": remote})
    killed = headway("train", config, f"runs={tmp_path}/first", faults="kill@step=4,kill@upload.file:1")
    assert killed.returncode == 1 and (tmp_path / "first/tiny/checkpoints/step-00000002").is_dir(), killed.stderr
    assert not list((tmp_path / "remote").rglob("step-*"))
    return config


def test_a_run_never_takes_the_steps_of_another_one_at_its_place(killed: Path, tmp_path: Path) -> None:
    """A clean-up has removed all that told whose the place is, and the second run got it."""
    place, run = tmp_path / "remote", tmp_path / "first" / "tiny"
    shutil.rmtree(place / "tiny")
    finished = headway("train", killed, f"runs={tmp_path}/second", "seed=4")
    assert finished.returncode == 0, finished.stderr
    before = contents(place)
    again = headway("train", killed, f"runs={tmp_path}/first")
    assert again.returncode == 2, again.stderr
    assert "belongs to run 'tiny' with seed 4" in again.stderr and "downloading" not in again.stderr
    assert contents(place) == before and not (run / "checkpoints" / f"step-{STEPS:08d}").exists()
    # As an older version left it: the first run's directory has the last step of the second.
    last = f"step-{STEPS:08d}"
    shutil.copytree(tmp_path / "second/tiny/checkpoints" / last, run / "checkpoints" / last)
    assert f"{last} was made by another run" in "; ".join(prove(run).problems)
    assert prove(tmp_path / "second" / "tiny").problems == []


@pytest.mark.slow
def test_the_run_that_came_second_is_refused_and_both_finish_at_places_of_their_own(
    killed: Path, tmp_path: Path
) -> None:
    place, run, other = tmp_path / "remote", tmp_path / "first" / "tiny", tmp_path / "second" / "tiny"
    before = contents(place)
    refused = headway("train", killed, f"runs={tmp_path}/second", "seed=4")
    assert refused.returncode == 2, refused.stderr
    assert "belongs to run 'tiny' with seed 3" in refused.stderr and "--restart" in refused.stderr
    assert "step 1/" not in refused.stderr and not (other / "metrics.jsonl").exists()
    assert contents(place) == before
    beside = headway("train", killed, f"runs={tmp_path}/second", "seed=4", "--restart")
    assert beside.returncode == 0, beside.stderr
    again = headway("train", killed, f"runs={tmp_path}/first")
    assert again.returncode == 0, again.stderr
    assert prove(run).problems == prove(other).problems == [] and state_hash(run) != state_hash(other)
    for generation, owner in ((1, run), (2, other)):
        (newest, *_) = reversed(remote_manifests(f"file://{place}/tiny/run-{generation:03d}"))
        assert newest.manifest.state_sha256 == state_hash(owner)
    # Both lose their disks, and find what is theirs.
    shutil.rmtree(run)
    found = headway("train", killed, f"runs={tmp_path}/first")
    assert found.returncode == 0 and f"tiny/run-001/step-{STEPS:08d}" in found.stderr, found.stderr
    assert prove(run).problems == []


def at_each_stop(run: Path, *actions: Callable[[], object]) -> Thread:
    """Do something each time the worker has stopped itself, and have it continue, whatever comes of it."""

    def work() -> None:
        for action in actions:
            stopped: list[int] = []

            def has_stopped(found: list[int] = stopped) -> bool:
                reading = read_heartbeat(run / "attempts/001/heartbeat-0")
                state = process_state(reading.pid) if reading is not None else None
                if state is not None and state.state == STOPPED:
                    found.append(state.pid)
                return bool(found)

            assert wait_until(has_stopped, 200)
            try:
                action()
            finally:
                os.kill(stopped[0], signal.SIGCONT)
            wait_until(lambda pid=stopped[0]: (state := process_state(pid)) is None or state.state != STOPPED, 60)

    thread = Thread(target=work, daemon=True)
    thread.start()
    return thread


def lose_claims(tiny: Tiny, url: str, tmp_path: Path) -> Path:
    """Train while a lifecycle rule removes the claim, and later another machine claims the run; returns the config."""
    run = tmp_path / "runs" / "tiny"
    # A machine that is busy while a worker is stopped is not to be taken for a worker that hangs.
    supervise = {"hang_seconds": 300, "max_failures": 0}
    checkpoint = {"every": "1 steps", "remote": {"url": url}}
    config = tiny(train={"steps": STEPS}, checkpoint=checkpoint, supervise=supervise)
    place = Objects(f"{url}/tiny/run-001")

    def is_sent(step: int) -> bool:
        return RemoteTier(place).manifest(step) is not None

    def remove_claims() -> None:
        assert wait_until(lambda: is_sent(1), 120)
        place.at("owners").remove(["00000001.json"])

    def claim_elsewhere() -> None:
        assert wait_until(lambda: is_sent(3), 120), "after its claim was removed it publishes again"
        elsewhere = tmp_path / "elsewhere" / "tiny"
        # The writer process still adds checkpoints and removes folders: what tells whose run it is is enough.
        kept = shutil.ignore_patterns("attempts", "checkpoints", "checkpoints.sqlite*", "remote.json", ".owner")
        shutil.copytree(run, elsewhere, ignore=kept)
        RemoteTier.find(Objects(f"{url}/tiny"), elsewhere).acquire(elsewhere, 2)

    thread = at_each_stop(run, remove_claims, claim_elsewhere)
    result = headway("train", config, faults="freeze@step=2,freeze@step=4", patient=True)
    thread.join(5)
    assert result.returncode == 4, result.stderr
    assert "owners/00000001.json, by which attempt 1 owns the remote checkpoints, was removed" in result.stderr
    assert "nothing more is uploaded: attempt 1 no longer owns the remote checkpoints; attempt 2 on" in result.stderr
    assert f"error: the run is finished here, but step {STEPS} is not uploaded" in result.stderr
    assert STEPS in read_metrics(run).series("checkpoint/upload_failed_step")[1].tolist()
    assert prove(run).problems == [] and max(f.manifest.step for f in remote_manifests(f"{url}/tiny")) < STEPS
    claim = read_claim(run)
    assert claim is not None and claim.number == 1
    return config


def test_a_claim_that_is_removed_is_made_again_and_one_that_is_lost_ends_in_an_error(
    tiny: Tiny, tmp_path: Path
) -> None:
    (tmp_path / "remote").mkdir()
    lose_claims(tiny, f"file://{tmp_path}/remote", tmp_path)


@pytest.mark.slow
def test_once_no_other_one_has_the_run_the_same_command_makes_up_for_what_was_not_sent(
    tiny: Tiny, s3: S3Server, tmp_path: Path
) -> None:
    url = f"{s3.url}/{tmp_path.name}-claims"
    again = headway("train", lose_claims(tiny, url, tmp_path))
    assert again.returncode == 0, again.stderr
    found = remote_manifests(f"{url}/tiny")[-1].manifest
    assert (found.step, found.state_sha256) == (STEPS, state_hash(tmp_path / "runs" / "tiny"))
