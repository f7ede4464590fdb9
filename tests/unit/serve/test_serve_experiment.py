"""Experiments: who is answered by which arm, outcomes once and durable, and the guard."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.core.errors import CheckpointError, ConfigError
from headway.serve.asking import RefusedRequest
from headway.serve.experiment.experiment import Experiment
from headway.serve.experiment.journal import JOURNAL, LATE_SECONDS, Plan, read_state
from headway.serve.experiment.report import headline, page, report
from headway.serve.experiment.sequential import Counts, SequentialTest
from headway.serve.experiment.split import Names, Split

PLAN = Plan("words", Split.parse("prod=50,candidate=50"), SequentialTest(effect=0.2))


class Clock:
    """A time that tests set."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def experiment(tmp_path: Path, clock: Clock) -> Iterator[Experiment]:
    one = Experiment(PLAN, tmp_path / "one", clock)
    yield one
    one.close()


def post(experiment: Experiment, name: Any, success: Any = True) -> dict[str, Any]:
    return asyncio.run(experiment.post({"request_id": name, "success": success}))


def refusal(experiment: Experiment, name: Any, success: Any = True) -> tuple[int, str | None]:
    with pytest.raises(RefusedRequest) as error:
        post(experiment, name, success)
    return error.value.status, error.value.code


def user_of_arm(arm: str, number: int) -> str:
    """A user whom an arm answers."""
    index = PLAN.split.arms.index(arm)
    found = (f"{number}-{k}" for k in range(1000))
    return next(user for user in found if PLAN.split.arm_of("words", user) == index)


def ask(experiment: Experiment, arm: str, number: int) -> str:
    """A request of a user whom an arm answers."""
    alias, name = experiment.choose(user_of_arm(arm, number))
    assert alias == arm
    return name


def decide(experiment: Experiment) -> int:
    """Let prod succeed and candidate fail until that is decided; return after how many outcomes."""
    for number in range(400):
        arm = PLAN.split.arms[number % 2]
        if experiment.decision is not None:
            return number
        post(experiment, ask(experiment, arm, number), arm == "prod")
    raise AssertionError("nothing was decided")


def test_users_keep_their_arm_in_the_shares_of_the_split() -> None:
    split = Split.parse("prod=90,candidate=10")
    arms = [split.arm_of("words", f"user-{number}") for number in range(20_000)]
    assert arms == [split.arm_of("words", f"user-{number}") for number in range(20_000)]
    assert Counter(arms)[1] / len(arms) == pytest.approx(0.1, abs=0.01)
    other = [split.arm_of("others", f"user-{number}") for number in range(20_000)]
    assert sum(one == two == 1 for one, two in zip(arms, other, strict=True)) < 400, "experiments divide alike"
    assert {split.arm_of("words", None) for _ in range(500)} == {0, 1}
    # Known values: a later version must not send users to the other arm.
    assert [Split.parse("a=1,b=1").arm_of("words", user) for user in ("anna", "bert", "carl", "dora")] == KNOWN


KNOWN = [0, 1, 1, 0]


@pytest.mark.parametrize(
    "text", ["", "prod", "prod=1", "prod=1,prod=2", "a=0,b=1", "a=1,b=2,c=3", "a=-1,b=2", "a=x,b=1"]
)
def test_a_wrong_split_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="does not divide"):
        Split.parse(text)


def test_an_identifier_says_who_asked_and_cannot_be_made_up() -> None:
    names = Names(b"k" * 32)
    name = names.make(1234.567, 1, "anna")
    found = names.read(name)
    assert found is not None
    assert (found.time, found.arm) == (1234.567, 1)
    assert found.unit == names.read(names.make(9.0, 0, "anna")).unit  # type: ignore[union-attr]
    assert found.unit != names.read(names.make(9.0, 0, "bert")).unit  # type: ignore[union-attr]
    assert names.read(name.replace("cmpl-", "chatcmpl-")) == found
    assert Names(b"j" * 32).read(name) is None
    for place in range(5, len(name)):
        changed = "0" if name[place] != "0" else "1"
        assert names.read(name[:place] + changed + name[place + 1 :]) is None
    assert "anna" not in name


def test_an_outcome_counts_once(experiment: Experiment) -> None:
    name = ask(experiment, "prod", 0)
    assert post(experiment, name) == {"request_id": name, "arm": "prod", "counted": True, "winner": None}
    assert refusal(experiment, name) == (409, "already_posted")
    assert refusal(experiment, f"chat{name}", False) == (409, "already_posted")


@pytest.mark.parametrize("name", ["", "cmpl-1", 3, None, ["a"], "cmpl-" + "0" * 77, "a" * 10_000])
def test_what_this_experiment_has_not_asked_is_refused(experiment: Experiment, name: Any) -> None:
    assert refusal(experiment, name)[0] == 404


def test_other_fields_and_values_are_refused(experiment: Experiment) -> None:
    name = ask(experiment, "prod", 0)
    assert refusal(experiment, name, 1) == (400, "invalid_value")
    with pytest.raises(RefusedRequest):
        asyncio.run(experiment.post({"request_id": name}))


def test_outcomes_are_taken_for_a_week(experiment: Experiment, clock: Clock) -> None:
    name = ask(experiment, "prod", 0)
    late = ask(experiment, "prod", 1)
    clock.now += LATE_SECONDS - 1
    assert post(experiment, name)["counted"]
    clock.now += 2
    assert refusal(experiment, late) == (410, "too_late")


def test_the_first_outcome_of_a_user_counts(experiment: Experiment, tmp_path: Path) -> None:
    """The outcomes of one user are alike, and would be taken for more evidence than they are."""
    user = user_of_arm("prod", 0)
    names = [experiment.choose(user)[1] for _ in range(3)]
    assert [post(experiment, name)["counted"] for name in names] == [True, False, False]
    state = read_state(tmp_path / "one")
    assert (state.counted[0], state.posted[0]) == (Counts(1, 1), Counts(3, 3))


def test_the_worse_arm_is_stopped_and_a_restart_keeps_that(tmp_path: Path, clock: Clock) -> None:
    experiment = Experiment(PLAN, tmp_path / "one", clock)
    open_request = ask(experiment, "candidate", 10**6)
    assert 20 <= decide(experiment) < 200
    assert experiment.arms() == ["prod"]
    assert {experiment.choose(f"user-{number}")[0] for number in range(50)} == {"prod"}
    with pytest.raises(ConfigError, match="another server"):
        Experiment(PLAN, tmp_path / "one", clock)
    experiment.close()
    again = Experiment(PLAN, tmp_path / "one", clock)
    assert again.arms() == ["prod"]
    assert again.choose(user_of_arm("candidate", 1))[0] == "prod"
    # An outcome that comes now is kept, and decides nothing more.
    assert post(again, open_request) == {
        "request_id": open_request,
        "arm": "candidate",
        "counted": False,
        "winner": "prod",
    }
    again.close()


def test_every_outcome_that_was_taken_survives_a_kill(experiment: Experiment, tmp_path: Path, clock: Clock) -> None:
    """A kill may cut the last line anywhere: what was taken before counts, and the cut one may come again."""
    names = [ask(experiment, "prod", number) for number in range(4)]
    for name in names[:3]:
        post(experiment, name)
    experiment.close()
    journal = tmp_path / "one" / JOURNAL
    whole = journal.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(last, len(whole) - 1, 17):
        journal.write_bytes(whole[:cut])
        again = Experiment(PLAN, tmp_path / "one", clock)
        assert post(again, names[2])["counted"]
        assert refusal(again, names[1]) == (409, "already_posted")
        post(again, names[3])
        again.close()
        assert read_state(tmp_path / "one").counted[0] == Counts(4, 4)


def test_another_version_begins_the_test_anew(experiment: Experiment, tmp_path: Path, clock: Clock) -> None:
    asyncio.run(experiment.note_version("prod", "words@1"))
    asyncio.run(experiment.note_version("candidate", "words@2"))
    old = ask(experiment, "prod", 0)
    post(experiment, ask(experiment, "prod", 1))
    asyncio.run(experiment.note_version("prod", "words@1"))
    assert read_state(tmp_path / "one").counted[0] == Counts(1, 1)
    clock.now += 1
    asyncio.run(experiment.note_version("candidate", "words@3"))
    clock.now += 1
    assert not post(experiment, old)["counted"]
    assert post(experiment, ask(experiment, "prod", 1))["counted"]
    assert read_state(tmp_path / "one").counted == [Counts(1, 1), Counts()]


def test_a_folder_keeps_to_its_experiment(experiment: Experiment, tmp_path: Path) -> None:
    experiment.close()
    with pytest.raises(ConfigError, match="another experiment"):
        Experiment(Plan("words", Split.parse("prod=90,candidate=10"), PLAN.test), tmp_path / "one")


@pytest.mark.parametrize(
    "line", ['{"kind": "outcome"}', '{"kind": "else"}', '{"no": 1}', '{"kind": "begin", "split": 1}']
)
def test_a_changed_journal_is_an_error(experiment: Experiment, tmp_path: Path, line: str) -> None:
    experiment.close()
    with (tmp_path / "one" / JOURNAL).open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(CheckpointError, match="the journal was changed"):
        read_state(tmp_path / "one")


def test_an_outcome_that_cannot_be_kept_does_not_count(experiment: Experiment, tmp_path: Path) -> None:
    name = ask(experiment, "prod", 0)
    journal = tmp_path / "one" / JOURNAL
    kept = journal.read_bytes()
    journal.unlink()
    journal.mkdir()
    assert refusal(experiment, name)[0] == 503
    journal.rmdir()
    journal.write_bytes(kept)
    assert post(experiment, name)["counted"]


def test_the_report_says_what_was_decided_when_and_why(experiment: Experiment, tmp_path: Path) -> None:
    before = report(tmp_path / "one")
    assert before["decision"] is None
    assert "No decision yet" in headline(before)
    asyncio.run(experiment.note_version("prod", "<b>words@1"))
    count = decide(experiment)
    found = report(tmp_path / "one")
    json.dumps(found)
    assert (found["decision"]["winner"], found["decision"]["stopped"]) == ("prod", "candidate")
    assert found["decision"]["time"] == 1_800_000_000.0
    assert sum(arm["counted"] for arm in found["arms"]) == count
    assert found["evidence"] >= found["needed"]
    html = page(found)
    assert "2027-01-15" in html
    assert "prod answers every request since" in html
    assert "<b>words" not in html
    with pytest.raises(ConfigError, match="has no experiment"):
        report(tmp_path)
