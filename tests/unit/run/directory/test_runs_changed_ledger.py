"""The books of a run that is changed, killed and rolled back, held against a recount of the tokens that its steps used.

No processes and no model: `support.untrained.Untrained` does everything else that an attempt does.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from headway.config import Config, load_resolved
from headway.core.errors import ConfigError, DataError
from headway.run.directory import ledger_proof
from headway.run.session import attempt, changes
from support import untrained
from support.made_of import MADE_OF
from support.untrained import LONGEST, Untrained

CHANGE = st.fixed_dictionaries(
    {
        "batch": st.sampled_from([2, 3, 4, 8]),
        "length": st.sampled_from([16, 8, 4]),
        "ramp": st.sampled_from([None, None, 600, 2000]),
        "tokens": st.sampled_from([None, 12_000, 15_000]),
        "seed": st.integers(0, 2),
        "mixed": st.booleans(),
        "grown": st.dictionaries(st.sampled_from("abc"), st.integers(0, 300), max_size=2),
        "in_front": st.booleans(),
        "new_epoch": st.sampled_from([False] * 7 + [True]),
    }
)

ATTEMPT = st.fixed_dictionaries(
    {
        "steps": st.integers(1, 8),
        "every": st.integers(1, 4),
        "lose": st.integers(0, 2),
        "gone": st.booleans(),
        "told": st.booleans(),
        "older": st.booleans(),
        "rollback": st.none() | st.tuples(st.integers(1, 6), st.integers(1, 3)),
        "change": st.none() | CHANGE,
    }
)
RUNS = {
    "tokens": st.dictionaries(st.sampled_from("abc"), st.integers(60, 700), min_size=1),
    "attempts": st.lists(ATTEMPT, min_size=1, max_size=7),
    "made_of": st.sampled_from(["", *MADE_OF]),
}


def change(run: Untrained, wanted: dict[str, Any]) -> None:
    """Write another config, and let the data grow."""
    length = run.train["sequence_length"]
    length = wanted["length"] if length % wanted["length"] == 0 else length
    run.train = {"sequence_length": length, "global_batch": wanted["batch"]}
    run.train |= {"steps": 500} if wanted["tokens"] is None else {"tokens": wanted["tokens"]}
    if wanted["ramp"]:
        run.train["batch_ramp"] = [{"global_batch": 1, "until": f"{wanted['ramp']} tokens"}]
    run.seed, run.mixed = wanted["seed"], wanted["mixed"]
    if wanted["grown"]:
        run.corpus.grow(wanted["grown"], wanted["in_front"])


def go_through(folder: Path, tokens: dict[str, int], attempts: list[dict[str, Any]], made_of: str) -> None:
    run, whole, one_length = Untrained(folder, tokens, made_of=made_of), True, True
    for one in [*attempts, {**attempts[-1], "change": None, "rollback": None, "told": True, "lose": 0, "steps": 8}]:
        wanted = one["change"]
        if wanted:
            change(run, wanted)
            whole &= not wanted["new_epoch"]
            one_length &= run.train["sequence_length"] == LONGEST
        run.attempt(
            one["steps"],
            one["every"],
            change=bool(wanted),
            new_epoch=bool(wanted) and wanted["new_epoch"],
            rollback=one["rollback"],
            told=one["told"],
            older=one.get("older", False),
        )
        run.lose(one["lose"], one["gone"])
    while run.is_behind:
        run.attempt(4)
    run.check()
    if whole:
        run.check_epochs()
        if one_length:
            run.check_table()


def check_runs(tokens: dict[str, int], attempts: list[dict[str, Any]], made_of: str) -> None:
    read: dict[bytes, Config] = {}

    def load(path: Path) -> Config:
        """Reading YAML would take most of the time."""
        content = path.read_bytes()
        return read[content] if content in read else read.setdefault(content, load_resolved(path))

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        for module in (attempt, changes, ledger_proof, untrained):
            stack.enter_context(patch.object(module, "load_resolved", load))
        try:
            go_through(Path(folder), tokens, attempts, made_of)
        except (ConfigError, DataError) as error:  # what cannot be asked for at all
            known = ("would end at step", "not followed by more", "has the weight")
            assert any(words in error.what for words in known), error


QUICK = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def test_rows_left_out_are_others_after_a_change(tmp_path: Path) -> None:
    """A spike in steps 4 and 5 sends the run back to step 3, where the batch is changed: steps 4 and 5 have other rows
    then, which nothing speaks against."""
    run = Untrained(tmp_path, {"a": 900})
    run.attempt(3)
    run.attempt(2, 9, rollback=(2, 1))
    assert run.proof().skipped_ranges == [(4, 5)] and max(run.used) == 2
    change(run, {**dict.fromkeys(("tokens", "ramp", "grown", "in_front")), "batch": 8, "length": 16, "seed": 0,
                 "mixed": False})  # fmt: skip
    run.attempt(6, change=True)
    assert run.proof().skipped_ranges == [] and all(run.used.values())
    run.check()
    run.check_epochs()


#: A ramp that ends in the middle of a step, and whose segment begins again one step earlier: half a step was rounded by
#: whether the number of steps was even, so the ramp ended elsewhere.
_RAMP = {"batch": 2, "length": 16, "tokens": None, "ramp": 600, "seed": 0, "mixed": False, "new_epoch": False}
HALF_A_STEP = [
    {"steps": 8, "every": 2, "rollback": (3, 1), "lose": 1, "gone": False, "told": False,
     "change": {**_RAMP, "grown": {}, "in_front": True}},
    {"steps": 5, "every": 4, "rollback": (3, 1), "lose": 1, "gone": True, "told": False,
     "change": {**_RAMP, "grown": {"a": 104}, "in_front": False}},
]  # fmt: skip
#: The third attempt goes back behind a checkpoint of the second, and is lost; the fourth begins from that checkpoint.
OUTLIVED = [
    {"steps": 1, "every": 1, "rollback": None, "lose": 0, "gone": False, "told": False, "change": None},
    {"steps": 5, "every": 2, "rollback": (2, 1), "lose": 1, "gone": False, "told": False, "change": None},
    {"steps": 6, "every": 2, "rollback": (1, 2), "lose": 2, "gone": False, "told": False, "change": None},
]


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("made_of", MADE_OF)
def test_what_moves_no_row_is_no_part_of_a_plan(made_of: str, older: bool, tmp_path: Path) -> None:
    """Older ledgers have the fingerprints of models in theirs, and are proven too."""
    run = Untrained(tmp_path, {"a": 900}, made_of=made_of)
    run.attempt(3, older=older)
    run.attempt(3)
    run.check()
    # Only the record of the run tells what else the plans of an older ledger hold.
    record = json.loads(run.run.record_path.read_text())
    record["fingerprints"]["teacher" if made_of == "teacher" else "pretrained"] = "0" * 64
    run.run.record_path.write_text(json.dumps(record))
    assert ["another plan of rows" in problem for problem in run.proof().problems] == [True] * older


@QUICK
@example(tokens={"a": 60}, attempts=HALF_A_STEP, made_of="")
@example(tokens={"a": 60}, attempts=OUTLIVED, made_of="adapter")
@given(**RUNS)
def test_the_ledger_of_any_history_counts_what_the_text_says(
    tokens: dict[str, int], attempts: list[dict[str, Any]], made_of: str
) -> None:
    check_runs(tokens, attempts, made_of)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@settings(QUICK, max_examples=1000)
@given(**RUNS)
def test_the_ledger_of_a_thousand_histories(
    tokens: dict[str, int], attempts: list[dict[str, Any]], made_of: str
) -> None:
    check_runs(tokens, attempts, made_of)
