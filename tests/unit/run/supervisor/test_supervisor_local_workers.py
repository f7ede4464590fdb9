"""Worker processes of this machine: what they know of each other, how they are waited for, and how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.core.coordination.launched import THREADS_VARIABLE, most_threads
from headway.core.files import scratch
from headway.core.process.waiting import wait_until
from headway.run.supervisor import local_workers
from headway.run.supervisor.local_workers import WorkersFailed, start_workers
from headway.run.supervisor.worker import SPARE_VARIABLE
from support.waits import LONG

#: What the workers of these tests do: leave their environment and number, then what the test orders.
_MODULE = """
import json, os, signal, sys, time
from pathlib import Path

def main():
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    facts = {**os.environ, "argv": sys.argv, "pid": os.getpid(), "session": os.getsid(0), "parent": os.getppid()}
    (folder / f"new-{rank}").write_text(json.dumps(facts))
    (folder / f"new-{rank}").rename(folder / f"worker-{rank}")
    exec((folder / f"order-{rank}").read_text())

if __name__ == "__main__":
    main()
"""

#: The second one waits until the first one has left its facts.
_OTHER_IS_THERE = "all(time.sleep(0.01) or 1 for _ in iter(Path(sys.argv[1], 'worker-0').exists, True))"


@pytest.fixture(params=["copies", "programs"])
def workers(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[dict[str, object]]]:
    """Starts two workers with an order each, and gives what they have left."""
    (tmp_path / "ordered_module.py").write_text(_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(local_workers, "can_be_copied", lambda: request.param == "copies")
    monkeypatch.delitem(sys.modules, "ordered_module", raising=False)

    def start(*orders: str, **options: object) -> list[dict[str, object]]:
        for rank, order in enumerate(orders):
            (tmp_path / f"order-{rank}").write_text(order)
        start_workers(len(orders), tmp_path, {"MORE": "yes"}, "ordered_module", str(tmp_path), **options)  # type: ignore[arg-type]
        return left(tmp_path, len(orders))

    return start


def left(folder: Path, count: int) -> list[dict[str, object]]:
    return [json.loads((folder / f"worker-{rank}").read_text()) for rank in range(count)]


@pytest.mark.parametrize(("given", "limit"), [(None, None), ("3", 3), ("4,2", 4)])
def test_workers_know_whether_the_user_has_limited_threads(
    workers: Callable[..., list[dict[str, object]]],
    monkeypatch: pytest.MonkeyPatch,
    given: str | None,
    limit: int | None,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    for one in workers("pass", "pass"):
        assert one["OMP_NUM_THREADS"] == (given or "1"), "no thread per core before a worker has chosen"
        monkeypatch.setenv("OMP_NUM_THREADS", str(one["OMP_NUM_THREADS"]))
        monkeypatch.setenv(THREADS_VARIABLE, str(one[THREADS_VARIABLE]))
        assert most_threads() == limit


def test_workers_know_their_place_and_lead_sessions_of_their_own(
    workers: Callable[..., list[dict[str, object]]], tmp_path: Path
) -> None:
    found = workers("pass", "pass", "pass")
    assert [(one["RANK"], one["LOCAL_RANK"]) for one in found] == [("0", "0"), ("1", "1"), ("2", "2")]
    for one in found:
        assert (one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"], one["MORE"]) == ("3", "3", "yes")
        assert one["argv"][1:] == [str(tmp_path)]  # type: ignore[index]
        assert one["session"] == one["pid"] and one["parent"] == os.getpid()
        assert not {"MASTER_ADDR", "MASTER_PORT"} & one.keys(), "there is no port"
    assert len({one["HEADWAY_RENDEZVOUS_FILE"] for one in found}) == 1
    assert "MORE" not in os.environ


def test_the_death_of_one_ends_the_others_and_is_what_is_told(
    workers: Callable[..., list[dict[str, object]]], tmp_path: Path
) -> None:
    with pytest.raises(WorkersFailed) as failed:
        workers("time.sleep(600)", f"{_OTHER_IS_THERE}; os.kill(os.getpid(), signal.SIGKILL)")
    assert failed.value.killed is not None and (failed.value.first.rank, failed.value.first.code) == (1, -9)
    assert wait_until(lambda: not any(alive(one["pid"]) for one in left(tmp_path, 2)), LONG)


def test_a_worker_that_does_not_end_is_killed(
    workers: Callable[..., list[dict[str, object]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_workers, "_END_SECONDS", 0.5)
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); Path(sys.argv[1], 'deaf').touch(); time.sleep(600)"
    with pytest.raises(WorkersFailed) as failed:
        workers(deaf, "while not Path(sys.argv[1], 'deaf').exists(): time.sleep(0.01)\nsys.exit(7)")
    assert failed.value.killed is None and (failed.value.first.rank, failed.value.first.code) == (1, 7)
    assert not alive(left(tmp_path, 1)[0]["pid"])


def test_reasons_are_read_from_memory(workers: Callable[..., list[dict[str, object]]]) -> None:
    exit_process = (
        f"open(os.environ[{SPARE_VARIABLE!r}], 'a').write(json.dumps({{'rank': int(rank), 'what': 'no room'}}))"
    )
    with pytest.raises(WorkersFailed) as failed:
        workers(f"{exit_process}; sys.exit(4)", "time.sleep(600)")
    assert failed.value.records == [{"rank": 0, "what": "no room"}]


def test_where_there_are_no_files_in_memory_they_are_in_the_folder_and_go(
    workers: Callable[..., list[dict[str, object]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_workers, "file_in_memory", lambda name: None)
    mode = "import stat; print(stat.S_IMODE(os.stat(os.environ['HEADWAY_RENDEZVOUS_FILE']).st_mode),"
    mode += " file=open(Path(sys.argv[1], 'mode'), 'w'))"
    (found,) = workers(mode)
    assert Path(str(found["HEADWAY_RENDEZVOUS_FILE"])).parent == tmp_path
    assert (tmp_path / "mode").read_text().strip() == str(0o600)
    assert not list(tmp_path.glob(".*"))


def alive(pid: object) -> bool:
    try:
        os.kill(int(str(pid)), 0)
    except ProcessLookupError:
        return False
    return True


_STARTER = """
import sys
from pathlib import Path
from headway.run.supervisor.local_workers import WorkersStopped, start_workers
sys.path.insert(0, sys.argv[1])
try:
    start_workers(2, Path(sys.argv[1]), {}, "ordered_module", sys.argv[1])
except WorkersStopped as stopped:
    print(stopped)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_a_signal_to_the_starter_reaches_the_workers(tmp_path: Path, number: signal.Signals) -> None:
    """Also where the end of a child cannot be known by inheritance."""
    (tmp_path / "ordered_module.py").write_text(_MODULE)
    exit_process = "(Path(sys.argv[1], 'took-' + os.environ['RANK']).touch(), sys.exit(0))"
    took = f"signal.signal({int(number)}, lambda *_: {exit_process})"
    for rank in range(2):
        (tmp_path / f"order-{rank}").write_text(f"{took}; Path(sys.argv[1], 'ready-' + rank).touch(); time.sleep(600)")
    starter = subprocess.Popen(
        ["bash", "-c", """trap '' CHLD; exec "$@" """, "bash", sys.executable, "-c", _STARTER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, LONG)
        starter.send_signal(number)
        assert starter.communicate(timeout=LONG)[0] == f"stopped by {number.name}\n"
    finally:
        starter.kill()
    assert len(list(tmp_path.glob("took-*"))) == 2


def test_the_files_in_memory_are_gone_with_their_makers() -> None:
    made = scratch.file_in_memory("test")
    if made is None:
        pytest.skip("there are no files in memory here")
    descriptor, path = made
    path.write_text("seen")
    assert os.pread(descriptor, 9, 0) == b"seen"
    os.close(descriptor)
    assert not path.exists()
