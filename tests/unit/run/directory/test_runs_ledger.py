"""The ledger adds up, whatever died on the way."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.checkpoint.save.fence import Fenced, OwnerUnknown
from headway.checkpoint.save.outcomes import Outcome
from headway.checkpoint.store import CheckpointStore
from headway.core.errors import CheckpointError
from headway.core.files import atomic as files
from headway.run.directory.ledger import Ledger, UnwritableLedger
from headway.run.directory.ledger_callback import LedgerKeeper
from headway.training.health.decisions import Decision
from support.states import make_state, save


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.jsonl")


def test_commits_follow_on_each_other(ledger: Ledger) -> None:
    assert ledger.committed_step == 0
    ledger.commit(1, 0, 10, {"a": 20, "b": 12}, "step-00000010")
    ledger.commit(2, 10, 15, {"a": 16}, "step-00000015")
    assert ledger.committed_step == 15
    assert [(c.attempt, c.first_step, c.last_step, c.rows) for c in Ledger(ledger.path).commits()] == [
        (1, 0, 10, {"a": 20, "b": 12}),
        (2, 10, 15, {"a": 16}),
    ]


@pytest.mark.parametrize(("first", "last"), [(0, 20), (11, 20), (10, 10), (10, 9)])
def test_a_gap_or_an_overlap_is_refused(ledger: Ledger, first: int, last: int) -> None:
    ledger.commit(1, 0, 10, {}, "step-00000010")
    with pytest.raises(CheckpointError, match="cannot be committed after step 10"):
        ledger.commit(1, first, last, {}, "step-00000020")
    assert ledger.committed_step == 10


def test_a_rollback_strikes_what_is_done_again(ledger: Ledger) -> None:
    for last in (10, 20, 30):
        ledger.commit(1, last - 10, last, {"a": 10}, f"step-{last}")
    ledger.rollback(10, "the newer checkpoints are damaged")
    assert ledger.committed_step == 10
    ledger.commit(2, 10, 30, {"a": 20}, "step-30")
    assert [(c.attempt, c.last_step) for c in ledger.commits()] == [(1, 10), (2, 30)]


def test_a_rollback_into_a_range_strikes_all_of_it(ledger: Ledger) -> None:
    ledger.commit(1, 0, 10, {}, "step-10")
    ledger.commit(1, 10, 20, {}, "step-20")
    ledger.rollback(15, "reason")
    assert ledger.committed_step == 10, "the rows of steps 10 to 15 are not known, so they are committed again"


class Rows:
    """A feed of two rows a step."""

    rows = 100

    def rows_by_source(self, first: int, last: int) -> dict[str, int]:
        return {"a": 2 * (last - first)}

    def describe(self, last: int) -> dict[str, int]:
        return {}


def job_at(step: int) -> Any:
    state = SimpleNamespace(cursor=SimpleNamespace(step=step), skipped_ranges=())
    config = SimpleNamespace(segments=[])
    return SimpleNamespace(state=state, config=config, task=SimpleNamespace(feed=Rows(), fingerprints={}))


def test_what_a_rollback_strikes_too_much_is_committed_again(ledger: Ledger, tmp_path: Path) -> None:
    """The line of step 15 was never written, and the checkpoint of step 20 is damaged."""
    ledger.commit(1, 0, 10, {"a": 20}, "step-00000010")
    ledger.commit(1, 10, 20, {"a": 20}, "step-00000020")
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (10, 15):
        save(store, step)
    LedgerKeeper(ledger, 2, store.directory).on_start(job_at(15))
    assert [(c.attempt, c.first_step, c.last_step) for c in ledger.commits()] == [(1, 0, 10), (1, 10, 15)]


def test_a_checkpoint_that_was_passed_over_tells_of_no_step(ledger: Ledger, tmp_path: Path) -> None:
    """Step 34's was damaged before the ledger knew of it, so the attempt after went on from step 30."""
    ledger.commit(1, 0, 25, {"a": 50}, "step-00000025")
    store = CheckpointStore(tmp_path / "checkpoints", keep=9)
    for step, attempt, parent in ((25, 1, None), (30, 8, 25), (34, 8, 25), (35, 11, 30), (40, 11, 30), (41, 12, 40)):
        origin = {"step": parent} if parent else None
        store.save(step, make_state(step), {"step": step}, {"attempt": attempt, "world_size": 1, "parent": origin})
    next((store.directory / "step-00000034").glob("*.safetensors")).unlink()
    LedgerKeeper(ledger, 13, store.directory).on_start(job_at(41))
    done = [(c.attempt, c.first_step, c.last_step) for c in ledger.commits()]
    assert done == [(1, 0, 25), (8, 25, 30), (11, 30, 35), (11, 35, 40), (12, 40, 41)]


def test_a_line_cut_off_by_a_kill_counts_as_not_written(ledger: Ledger) -> None:
    ledger.commit(1, 0, 10, {}, "step-10")
    whole = ledger.path.stat().st_size
    ledger.commit(1, 10, 20, {}, "step-20")
    # Without its line end a record is still whole; from there on it is cut.
    for size in range(ledger.path.stat().st_size - 2, whole - 1, -1):
        os.truncate(ledger.path, size)
        assert ledger.committed_step == 10, size
    with ledger.path.open("ab") as file:
        file.write(b'{"kind":"comm')
    ledger.commit(2, 10, 20, {}, "step-20")
    assert [c.attempt for c in ledger.commits()] == [1, 2]


@pytest.mark.parametrize(
    "line",
    [
        '{"kind":"commit","attempt":1,"first_step":12,"last_step":20,"rows":{},"checkpoint":"x"}',
        '{"kind":"commit","attempt":1}',
        '{"kind":"commit","attempt":1,"first_step":10,"last_step":"x","rows":{},"checkpoint":"x"}',
        '{"note":"hello"}',
    ],
)
def test_a_ledger_that_does_not_add_up_says_so(ledger: Ledger, line: str) -> None:
    ledger.commit(1, 0, 10, {}, "step-10")
    with ledger.path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(CheckpointError, match="the ledger"):
        _ = ledger.committed_step


def test_a_full_disk_is_a_clear_error(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("headway.run.directory.ledger.append_json_line", full)
    with pytest.raises(CheckpointError, match="ledger cannot be written: No space left"):
        ledger.commit(1, 0, 10, {}, "step-10")
    monkeypatch.setattr("headway.run.directory.ledger.append_json_line", files.append_json_line)
    ledger.commit(1, 0, 10, {}, "step-10")


def test_a_ledger_that_cannot_be_read_takes_no_line(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").mkdir()
    with pytest.raises(UnwritableLedger, match="cannot be written: Is a directory"):
        Ledger(tmp_path / "ledger.jsonl").commit(1, 0, 2, {"a": 2}, "step-00000002")


def full(*_: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def unknown() -> None:
    raise OwnerUnknown("the owner of this run cannot be read")


def decision(action: Any) -> Decision:
    return Decision(7, action, "the loss is not finite", 7, to_step=4 if action == "rollback" else None)


@pytest.mark.parametrize("trouble", ["full", "unknown"])
@pytest.mark.parametrize("action", ["skip", "stop", "rollback"])
def test_only_a_rollback_needs_its_line(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], action: str, trouble: str
) -> None:
    """A disk that fails ends no attempt by itself, and what a step comes to is decided again where it is done again."""
    keeper = LedgerKeeper(ledger, 1, ledger.path.parent, unknown if trouble == "unknown" else lambda: None)
    if trouble == "full":
        monkeypatch.setattr("headway.run.directory.ledger.append_json_line", full)
    if action == "rollback":
        with pytest.raises(CheckpointError, match=r"cannot be (written: No space left|read)"):
            keeper.on_decision(job_at(8), decision(action))
    else:
        keeper.on_decision(job_at(8), decision(action))
        assert "the ledger lacks that step 7 had no update" in capsys.readouterr().err
    assert not ledger.path.exists()


def test_a_decision_has_reached_the_disk_when_it_is_carried_out(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt after a power cut would train the rows that this one has left out."""
    on_disk: list[bytes] = []
    monkeypatch.setattr(os, "fsync", lambda file: on_disk.append(ledger.path.read_bytes()))
    LedgerKeeper(ledger, 1, ledger.path.parent).on_decision(job_at(8), decision("rollback"))
    assert b'"rollback"' in on_disk[0] and on_disk[-1] == ledger.path.read_bytes()


@pytest.mark.parametrize("part", ['"rows": {"a": 1, "a": 2}', '"last_step": 4, "last_step": 6'])
def test_a_line_that_gives_a_key_twice_is_refused(ledger: Ledger, part: str) -> None:
    """Who reads the first of them and who reads the last would not agree on what was trained."""
    ledger.commit(1, 0, 2, {"a": 4}, "step-00000002")
    line = '{"kind": "commit", "attempt": 1, "first_step": 2, "checkpoint": "x", %s}\n'
    with ledger.path.open("a") as file:
        file.write(line % part)
    with pytest.raises(CheckpointError, match=r"gives the key '(a|last_step)' twice"):
        ledger.commits()


@pytest.mark.parametrize("action", ["skip", "stop", "rollback"])
def test_who_has_lost_the_run_decides_nothing(ledger: Ledger, action: str) -> None:
    """Between a step and its decision a write is waited for and checkpoints are read, which can take minutes."""

    def lost() -> None:
        raise Fenced("attempt 1 no longer owns this run")

    ledger.commit(1, 0, 6, {"a": 12}, "step-00000006")
    before = ledger.path.read_bytes()
    with pytest.raises(Fenced):
        LedgerKeeper(ledger, 1, ledger.path.parent, lost).on_decision(job_at(8), decision(action))
    assert ledger.path.read_bytes() == before


def test_a_checkpoint_waits_for_its_line_while_the_ledger_cannot_be_read(
    ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line of the next one makes up for it; the last one has no next."""
    ledger.path.mkdir()
    keeper, job = LedgerKeeper(ledger, 1, ledger.path.parent), job_at(8)
    job.ends_at = lambda step: step == 10
    keeper.on_saved(job, Outcome(8, 0.1))
    assert "the line of the next checkpoint covers these steps too" in capsys.readouterr().err
    with pytest.raises(UnwritableLedger):
        keeper.on_saved(job, Outcome(10, 0.1))
