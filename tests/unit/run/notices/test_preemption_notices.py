"""Each source against a local service that speaks its protocol; and a watcher that nothing disturbs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from headway.checkpoint.save.outcomes import Outcome
from headway.config import PreemptionConfig
from headway.core.coordination.preemption_board import SIGNAL_KEY, Board, Notice, post, posted
from headway.core.errors import HeadwayError, Preempted
from headway.core.machine.system import Machine, Output
from headway.core.process.waiting import wait_until
from headway.run.notices import metadata, watching, watching_for
from headway.run.notices.aws import Aws
from headway.run.notices.azure import Azure
from headway.run.notices.detect import detected, make_sources
from headway.run.notices.gcp import Gcp
from headway.run.notices.metadata import Unavailable
from headway.run.notices.slurm import Slurm
from headway.training.stop import NoticeReader, StopSignals, sender, too_short
from support.notices import Cloud, metadata_service, utc
from support.waits import LONG


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    # A proxy must not be asked for what only the machine itself knows.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    opened = metadata._opener.open
    # The service of the test runs beside it, on a machine that may be busy.
    monkeypatch.setattr(metadata._opener, "open", lambda request, timeout: opened(request, timeout=timeout + 30))
    with metadata_service() as service:
        yield service


def test_aws_needs_a_token_and_tells_interruptions_and_recommendations(cloud: Cloud) -> None:
    aws = Aws(cloud.url)
    assert aws.check() is None
    cloud.rebalance = {"noticeTime": utc(0)}
    found = aws.check()
    assert found and (found.wish, found.deadline) == ("save", None)
    found = Aws(cloud.url, "stop").check()
    assert found and found.wish == "stop"
    assert Aws(cloud.url, "ignore").check() is None
    cloud.tokens = ["token-2"]  # the old one has run out
    earliest = int(time.time()) + 120
    cloud.spot = {"action": "terminate", "time": utc(120)}
    latest = time.time() + 120
    found = aws.check()
    assert found and found.wish == "stop" and "terminate" in str(found)
    assert found.deadline and earliest <= found.deadline <= latest
    cloud.spot = {"action": "hibernate", "time": utc(120)}
    found = aws.check()
    assert found and found.deadline is None, "hibernation begins at once"


def test_gcp_is_told_of_a_change_while_it_waits(cloud: Cloud) -> None:
    # So long that a question which waits for the end of the time is never answered.
    gcp, host = (Gcp(what, cloud.url, wait_seconds=100_000) for what in ("preempted", "maintenance-event"))
    assert gcp.check() is None and host.check() is None
    earliest = time.time() + 30
    threading.Timer(0.1, cloud.change_google, ("preempted", "TRUE")).start()
    found = gcp.check()
    assert found and found.deadline and earliest <= found.deadline <= time.time() + 30
    cloud.change_google("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE")
    assert host.check() is None, "a migration takes the process along"
    cloud.change_google("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")
    found = host.check()
    assert found and found.wish == "stop"


def test_gcp_maintenance_is_heard_with_a_grace_shorter_than_its_notice(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is put off at first, and the server would hold the next answer back beyond its time."""
    monkeypatch.setattr("headway.run.notices.gcp._MAINTENANCE_SECONDS", 6.0)
    came: list[Notice] = []
    source = Gcp("maintenance-event", cloud.url, wait_seconds=600)
    with watching(PreemptionConfig(grace_seconds=3), came.append, sources=[source]):
        assert wait_until(lambda: bool(source._etag), LONG)
        cloud.change_google("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")
        assert wait_until(came.__len__, LONG)
        assert wait_until(lambda: len(cloud.asked) > 4, LONG), "the machine may stay for an hour: it is asked on"
    assert len(came) == 1


def test_azure_hears_that_an_event_is_moved_or_has_begun(cloud: Cloud) -> None:
    azure, now = Azure(cloud.url), int(time.time())

    def told(**facts: str) -> float:
        cloud.events = [{"EventId": "b", "EventType": "Reboot", "Resources": ["trainer_7"], **facts}]
        found = azure.check()
        assert found is not None and found.deadline is not None
        return found.deadline

    assert told(NotBefore=formatdate(now + 900, usegmt=True)) == now + 900
    assert told(NotBefore=formatdate(now + 600, usegmt=True)) == now + 600
    assert told(NotBefore=formatdate(now + 1200, usegmt=True)) == now + 1200, "later, too"
    begun = told(EventStatus="Started", NotBefore=formatdate(now + 1200, usegmt=True))
    assert begun <= time.time() + 30
    assert told(EventStatus="Started", NotBefore="") == begun, "a time that was not said does not move on"
    cloud.events = []
    assert azure.check() is None
    assert told(EventStatus="Started") > begun, "another one, of which nothing was known"


def test_azure_tells_events_of_this_machine_only_and_takes_an_answer(cloud: Cloud) -> None:
    azure = Azure(cloud.url)
    others = {"EventId": "a", "EventType": "Preempt", "Resources": ["trainer_8"], "NotBefore": formatdate(usegmt=True)}
    cloud.events = [others, {**others, "EventType": "Freeze", "Resources": ["trainer_7"]}]
    assert azure.check() is None
    due = int(time.time()) + 900
    at = formatdate(due, usegmt=True)
    cloud.events += [{"EventId": "b", "EventType": "Reboot", "Resources": ["trainer_7", "x"], "NotBefore": at}]
    found = azure.check()
    assert found and found.deadline == due and "Reboot" in found.what
    azure.acknowledge(found)
    Azure(cloud.url, answers=False).acknowledge(found)
    assert cloud.started == ["b"]
    cloud.events = [{"EventId": "c", "EventType": "Preempt", "Resources": ["trainer_7"], "NotBefore": ""}]
    earliest = time.time() + 30
    found = azure.check()
    assert found and found.deadline and earliest <= found.deadline <= time.time() + 30


def slurm_machine(end: float, left: str) -> tuple[Machine, list[Any]]:
    asked: list[Any] = []

    def run(arguments: Any) -> Output:
        asked.append(arguments)
        return Output("ok", f"{left}\n")

    known = {"SLURM_JOB_END_TIME": str(int(end))} if end else {}
    return Machine(run=run, environment={"SLURM_JOB_ID": "12", **known}), asked


def test_slurm_asks_its_controller_only_when_the_end_is_near() -> None:
    end = int(time.time()) + 7200
    far, asked = slurm_machine(end, "2:00:00")
    slurm = Slurm(far, grace_seconds=120)
    found = slurm.check()
    assert found and found.deadline == end and not asked
    earliest = time.time() + 86410
    moved, asked = slurm_machine(time.time() + 60, "1-00:00:10")
    slurm = Slurm(moved, grace_seconds=120)
    for _ in range(3):
        found = slurm.check()
    assert found and found.deadline and earliest <= found.deadline <= time.time() + 86410
    assert len(asked) == 1, "the end was moved; it is near tomorrow"
    unknown, asked = slurm_machine(0, "UNLIMITED")
    slurm = Slurm(unknown, grace_seconds=120)
    assert [slurm.check() for _ in range(3)] == [None] * 3 and len(asked) == 1
    end = int(time.time()) + 60
    silent, asked = slurm_machine(end, "INVALID")
    slurm = Slurm(silent, grace_seconds=120)
    found = [slurm.check() for _ in range(3)][-1]
    assert found and found.deadline == end and len(asked) == 1


def test_a_cloud_is_told_from_firmware(tmp_path: Path) -> None:
    dmi = tmp_path / "sys/class/dmi/id"
    dmi.mkdir(parents=True)
    machine = Machine(root=tmp_path, environment={})
    assert detected(machine) == []
    (dmi / "sys_vendor").write_text("Microsoft Corporation\n")
    assert detected(machine) == [], "any Hyper-V says that"
    (dmi / "chassis_asset_tag").write_text("7783-7084-3265-9085-8269-3286-77\n")
    assert detected(replace(machine, environment={"SLURM_JOB_ID": "1"})) == ["azure", "slurm"]
    (dmi / "product_name").write_text("Google Compute Engine\n")
    (dmi / "sys_vendor").write_text("Amazon EC2\n")
    assert detected(machine) == ["aws", "gcp", "azure"]
    assert len(make_sources(PreemptionConfig(), machine)) == 4
    assert not make_sources(PreemptionConfig(watch="none"), machine)
    (aws,) = make_sources(PreemptionConfig(watch=["aws"], endpoints={"aws": "http://h:1/"}), machine)
    assert isinstance(aws, Aws) and aws._endpoint == "http://h:1"


class Scripted:
    """A source that says one thing after the other."""

    name, pause_seconds = "scripted", 0.01

    def __init__(self, *says: Notice | Exception | None) -> None:
        self.says, self.done, self.answers = list(says), threading.Event(), list[Notice]()

    def check(self) -> Notice | None:
        if len(self.says) == 1:
            self.done.set()
        said = self.says.pop(0) if len(self.says) > 1 else self.says[0]
        if isinstance(said, Exception):
            raise said
        return said

    def acknowledge(self, notice: Notice) -> None:
        self.answers.append(notice)


def test_a_notice_is_handed_on_once_in_time_and_answered_when_all_is_saved() -> None:
    soon, later = Notice("s", "now", deadline=time.time() + 50), Notice("s", "in an hour", deadline=time.time() + 3600)
    for error in (Preempted("saved"), HeadwayError("crashed"), RuntimeError("crashed")):
        source = Scripted(later, None, Unavailable("away"), KeyError("nonsense"), soon, soon)
        came: list[Notice] = []
        with pytest.raises(type(error)), watching(PreemptionConfig(), came.append, sources=[source]):
            assert source.done.wait(LONG)
            assert wait_until(came.__len__, LONG)
            raise error
        assert came == [soon], "what is far off may be called off; what is near is said once"
        assert source.answers == ([soon] if isinstance(error, Preempted) else [])


def test_an_end_that_is_moved_is_another_notice_and_answered_once() -> None:
    first, moved = (Notice("s", "reboot", deadline=time.time() + left, key="b") for left in (50, 20))
    source, came = Scripted(first, moved, moved), list[Notice]()
    with pytest.raises(Preempted), watching(PreemptionConfig(), came.append, sources=[source]):
        assert wait_until(lambda: len(came) == 2, LONG)
        raise Preempted("saved")
    assert came == [first, moved] and source.answers == [moved]


def test_a_callback_that_fails_is_called_again(capsys: pytest.CaptureFixture[str]) -> None:
    came, notice = [], Notice("s", "now")
    again = threading.Event()

    def full_disk(found: Notice) -> None:
        came.append(found)
        if len(came) < 4:
            raise OSError("no space left")
        again.set()

    with watching(PreemptionConfig(), full_disk, sources=[Scripted(notice)]):
        assert again.wait(LONG)
    assert "no space left" in capsys.readouterr().err


@pytest.mark.parametrize("service", ["away", "slow", "nonsense"])
def test_a_service_that_fails_is_no_ones_business(
    cloud: Cloud, service: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked, over = threading.Event(), threading.Event()

    def slowly(*_: Any, **__: Any) -> None:
        asked.set()
        over.wait()
        raise OSError("nobody listens any more")

    url = cloud.url
    if service == "away":
        url = "http://127.0.0.1:9"
    elif service == "slow":
        monkeypatch.setattr(metadata._opener, "open", slowly)
    else:
        cloud.nonsense = b"<html>\xff not here</html>"
    endpoints = dict.fromkeys(("aws", "gcp", "azure"), url)
    config = PreemptionConfig(watch=["aws", "gcp", "azure"], endpoints=endpoints)  # type: ignore[arg-type]
    if service != "slow":
        for source in make_sources(config, Machine()):
            with pytest.raises(Unavailable):
                source.check()
    with watching_for(tmp_path, config):  # whose end waits for no question under way: this one would never end
        assert service != "slow" or asked.wait(LONG)
    over.set()
    assert not posted(tmp_path)


def test_the_board_is_read_as_it_grows_and_becomes_wishes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reader, board = NoticeReader(tmp_path), Board(tmp_path, every_seconds=0)
    reader._board = board
    signals = StopSignals(reader)
    assert (signals.stop, signals.save) == (False, False)
    post(tmp_path, Notice("aws", "rebalance recommendation", "save"))
    with (tmp_path / "notices.jsonl").open("a") as file:
        file.write('{"source": "aws", "what": "cut o')
    assert (signals.stop, signals.save) == (False, True)
    reader.on_checkpoint(None, 3, 0.1)  # type: ignore[arg-type]
    reader.on_saved(None, Outcome(3, seconds=40.0))  # type: ignore[arg-type]
    assert (signals.stop, signals.save) == (False, False), "saved once"
    post(tmp_path, Notice("aws", "spot interruption (terminate)", deadline=time.time() + 20))
    assert (signals.stop, signals.save) == (True, False)
    assert "spot interruption (terminate)" in signals.reason()
    said = capsys.readouterr().err
    assert said.count("saving and stopping") == 1 and "the last save took 40 s" in said
    assert [record["what"] for record in posted(tmp_path)] == ["rebalance recommendation", signals.reason()[5:34]]


def test_a_signal_on_the_board_has_the_same_name_for_every_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of them is the one that is heard."""
    first, other = StopSignals(NoticeReader(tmp_path)), StopSignals(NoticeReader(tmp_path))
    first.name = "SIGHUP"
    assert first.reason() == "SIGHUP" and [record["key"] for record in posted(tmp_path)] == [SIGNAL_KEY]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert other.reason() == "SIGHUP"


def test_whether_a_save_fits_is_said_only_where_it_is_known() -> None:
    notice = Notice("aws", "x", deadline=time.time() + 60)
    assert too_short(notice, 30.0) is None and too_short(notice, None) is None
    assert too_short(Notice("aws", "x"), 1e9) is None
    assert "may not be done" in (too_short(notice, 90.0) or "")
    assert sender({"KUBERNETES_SERVICE_HOST": "x", "SLURM_JOB_ID": "1"}) == "kubernetes"
    assert (sender({"SLURM_JOB_ID": "1"}), sender({})) == ("slurm", "signal")
