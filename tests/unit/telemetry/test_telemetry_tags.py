"""Tags and notes: what people write is kept, and a file that others wrote breaks nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headway.cli.application import application
from headway.core.errors import ConfigError
from headway.telemetry.tags import Tags, change_tags, read_tags

from .conftest import MakeRun


def test_tags_are_added_once_and_removed(tmp_path: Path) -> None:
    assert read_tags(tmp_path) == Tags()
    change_tags(tmp_path, ["b", "a", "b"], note="first\nsecond")
    assert read_tags(tmp_path) == Tags(("b", "a"), "first\nsecond"), "in the order in which they were given"
    assert change_tags(tmp_path, ["c"], ["b", "never"]) == Tags(("a", "c"), "first\nsecond"), "the note stays"
    assert change_tags(tmp_path, note="") == Tags(("a", "c"))


@pytest.mark.parametrize("tag", ["", "  ", "a,b", "a\x1b[31m", "x" * 61])
def test_what_is_no_tag_is_refused(tmp_path: Path, tag: str) -> None:
    with pytest.raises(ConfigError, match="is no tag"):
        change_tags(tmp_path, ["good", tag])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"[1, 2]", Tags()),
        (b"\xff\x00", Tags()),
        (b'{"tags": "abc", "note": 3}', Tags()),
        (json.dumps({"tags": ["a", 3, None, "a", "x" * 99]}).encode(), Tags(("a", "x" * 60))),
        (json.dumps({"tags": [str(number) for number in range(999)]}).encode(), Tags(tuple(map(str, range(50))))),
        (json.dumps({"note": "a\x1b[31mb"}).encode(), Tags(note="a\\x1b[31mb")),
    ],
)
def test_a_file_of_others_gives_what_can_be_used(tmp_path: Path, content: bytes, found: Tags) -> None:
    (tmp_path / "tags.json").write_bytes(content)
    assert read_tags(tmp_path) == found


def test_the_verb_changes_all_runs_or_none(make_run: MakeRun, tmp_path: Path) -> None:
    first, second = (str(make_run(name)) for name in ("a", "b"))

    def invoke(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(application(["runs"]), ["runs", "tag", *words])
        return done.exit_code, done.output

    code, _ = invoke(first, str(tmp_path / "none"), "--add", "x")
    assert code and read_tags(Path(first)) == Tags()
    assert invoke(first, second, "--add", "x", "-a", "y", "--note", "why")[0] == 0
    assert read_tags(Path(second)) == Tags(("x", "y"), "why")
    assert invoke(first, "--remove", "x")[1] == f"{first}: y\nwhy\n"
    assert json.loads(invoke(second, "--json")[1]) == [{"run": second, "tags": ["x", "y"], "note": "why"}]
