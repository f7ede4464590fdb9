"""Errors that a person can act on, and that survive the trip between processes."""

from __future__ import annotations

import pickle

import pytest

from headway.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    HeadwayError,
    Preempted,
    missing_extra,
)

CODES = {HeadwayError: 1, ConfigError: 2, DataError: 3, CheckpointError: 4, DivergedError: 5, Preempted: 75}


@pytest.mark.parametrize("kind", CODES)
def test_every_error_has_its_exit_code_and_survives_pickling(kind: type[HeadwayError]) -> None:
    error = kind("what is wrong", where="file:3", fix="do this")
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert type(again) is kind
    assert (again.what, again.where, again.fix) == ("what is wrong", "file:3", "do this")
    assert again.exit_code == error.exit_code == CODES[kind]
    assert str(again) == str(error)


def test_three_lines() -> None:
    error = HeadwayError("what", where="here", fix="this")
    assert error.render() == "error: what\n  where: here\n  fix:   this"
    assert str(error) == error.render()


def test_what_is_unknown_is_left_out() -> None:
    assert HeadwayError("what").render() == "error: what"
    assert HeadwayError("what", fix="this").render() == "error: what\n  fix:   this"


def test_a_missing_extra_tells_the_command() -> None:
    error = missing_extra("pyarrow", "parquet", "reading a.parquet")
    assert isinstance(error, ConfigError)
    assert "pyarrow" in error.what
    assert error.fix == "python -m pip install 'pyarrow>=15'"


def test_names_of_others_forge_no_lines_and_steer_no_terminal() -> None:
    error = ConfigError("'a\nerror: b\x1b[31m' is wrong:\n    first\n    second", where="c\nfix: d", fix="e\u202ef")
    assert error.render().splitlines() == [
        "error: 'a",
        "    error: b\\x1b[31m' is wrong:",
        "    first",
        "    second",
        "  where: c\\nfix: d",
        "  fix:   e\\u202ef",
    ]
