"""Files of a run that somebody has replaced: whatever is in their place, commands that read them end, in little memory
and without a traceback, and say what is wrong where they cannot do without."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import yaml

# So that copies of this process need not load them each.
import headway.checkpoint.transfer
import headway.run.directory.ledger_proof
import headway.telemetry.report  # noqa: F401
from headway.checkpoint.format.manifest import MANIFEST, FileEntry, Manifest, Slice, TensorEntry, state_hash
from headway.cli.application import application
from support.runs import headway_in_copy

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="copies of this process are limited as Linux does"),
    pytest.mark.timeout(600),
]

application()
SHA = "0" * 64
DEEP = "[" * 100_000
READERS = {
    "list": ["runs", "list", "runs"],
    "show": ["runs", "show", "runs/a"],
    "ledger": ["ledger", "runs/a"],
    "checkpoints": ["checkpoints", "list", "runs/a"],
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of four steps, in `runs/a` of the working directory."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "a"
    attempt, checkpoint = folder / "attempts" / "001", folder / "checkpoints" / "step-00000004"
    attempt.mkdir(parents=True)
    checkpoint.mkdir(parents=True)
    config = {"name": "a", "train": {"steps": 4, "global_batch": 2, "sequence_length": 8}, "data": {"store": "store"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "run.json").write_text(json.dumps({"command": ["headway", "train"], "folder": str(tmp_path)}))
    ended = {"number": 1, "started": 1e9, "ended": 1e9 + 9, "outcome": "finished", "exit_code": 0, "last_step": 4}
    (attempt / "attempt.json").write_text(json.dumps(ended))
    steps = [{"step": n, "attempt": 1, "time": 1e9 + n, "train/loss": 5.0 - n} for n in range(1, 5)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    commit = {"kind": "commit", "attempt": 1, "first_step": 0, "last_step": 4, "rows": {"s": 8}, "time": 1e9}
    (folder / "ledger.jsonl").write_text(json.dumps({**commit, "checkpoint": "step-00000004"}) + "\n")
    tensors = {
        "w": TensorEntry(
            dtype="F32", shape=(2,), sha256=SHA, slices=(Slice(file="a.safetensors", offset=(0,), shape=(2,)),)
        )
    }
    manifest = Manifest(
        step=4,
        cursor={"step": 4},
        context={"time": 1e9, "attempt": 1},
        state_sha256=state_hash(tensors, {"step": 4}),
        files={"a.safetensors": FileEntry(bytes=8, parts_sha256=SHA)},
        tensors=tensors,
    )
    (checkpoint / MANIFEST).write_bytes(manifest.render())
    return folder


def _link_to_zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _terabyte(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)


def _deep(path: Path) -> None:
    path.write_text(f'{{"step": 1, "kind": "x", "a": {DEEP}')


ODD: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "device": _link_to_zero,
    "terabyte": _terabyte,
    "deep": _deep,
    "folder": Path.mkdir,
}
FILES = [
    "metrics.jsonl",
    "ledger.jsonl",
    "run.json",
    "config.yaml",
    "attempts/001/attempt.json",
    "checkpoints/step-00000004/manifest.json",
    "checkpoints.sqlite",
]


def test_the_run_is_read_where_nothing_is_odd(run: Path) -> None:
    """Else what follows would show nothing."""
    for command in ("list", "show", "checkpoints"):
        code, printed = headway_in_copy(*READERS[command])
        assert code == 0 and "4" in printed


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("odd", ODD)
def test_odd_files_of_a_run_neither_stop_nor_fill_nor_crash_what_reads_it(run: Path, name: str, odd: str) -> None:
    (run / name).unlink(missing_ok=True)
    ODD[odd](run / name)
    # What reads the file is tried; the others are as good as tried with another.
    readers = ["ledger", "show"] if name == "ledger.jsonl" else ["checkpoints", "list"]
    for reader in ["checkpoints"] if "sqlite" in name else readers:
        code, printed = headway_in_copy(*READERS[reader])
        assert code in (0, 2, 4), printed
        assert "Traceback" not in printed


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("odd", ODD)
def test_no_command_is_stopped_by_an_odd_file(run: Path, name: str, odd: str) -> None:
    (run / name).unlink(missing_ok=True)
    ODD[odd](run / name)
    for command in (*READERS.values(), ["report", "runs/a"], ["runs", "compare", "runs/a", "runs/a"]):
        code, printed = headway_in_copy(*command)
        assert code in (0, 2, 4), printed
        assert "Traceback" not in printed


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl"])
def test_a_line_that_nests_deeply_is_passed_over(run: Path, name: str) -> None:
    """`report` among others ended in a RecursionError."""
    with (run / name).open("a") as file:
        file.write(f'{{"step": 2, "kind": "x", "a": {DEEP}\n{{"step": 2, "kind": "x", "a": {"[" * 900}{"]" * 900}}}\n')
    for command in (READERS["show"], READERS["ledger"], ["report", "runs/a"]):
        code, printed = headway_in_copy(*command)
        assert code in (0, 4) and "Recursion" not in printed
    assert "no commit" not in printed


def test_a_ledger_that_gives_a_key_twice_counts_for_nothing(run: Path) -> None:
    """Who reads the first of them and who reads the last would not agree on what was trained."""
    line = (run / "ledger.jsonl").read_text()
    (run / "ledger.jsonl").write_text(line.replace('"last_step": 4', '"last_step": 2, "last_step": 4'))
    code, printed = headway_in_copy(*READERS["ledger"])
    assert code == 4 and "Traceback" not in printed


@pytest.mark.parametrize(
    "value", [10**400, [1], {"a": 1}, "\x1b[31m", None, -1], ids=["huge", "list", "object", "text", "null", "negative"]
)
@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl", "attempts/001/attempt.json"])
def test_values_of_other_kinds_are_unknown(run: Path, name: str, value: object) -> None:
    kept = ("step", "attempt", "kind", "first_step", "last_step", "number")
    lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
    odd = [{key: old if key in kept else value for key, old in line.items()} for line in lines]
    (run / name).write_text("".join(json.dumps(line) + "\n" for line in odd))
    code, printed = headway_in_copy(*READERS["ledger" if name == "ledger.jsonl" else "show"])
    assert code in (0, 4) and "Traceback" not in printed


def test_an_index_that_is_a_query_without_end_is_not_asked(run: Path) -> None:
    with closing(sqlite3.connect(run / "checkpoints.sqlite")) as made:
        made.execute(
            "CREATE VIEW checkpoints AS WITH RECURSIVE t(step) AS (SELECT 1 UNION ALL SELECT step + 1 FROM t)"
            " SELECT * FROM t"
        )
        made.commit()
    code, printed = headway_in_copy(*READERS["checkpoints"])
    assert code == 0 and "has views or triggers" in printed


#: Colours, a cursor that goes up, a title, another line, bidirectional overrides, a C1 control, a half of a pair.
NASTY = "x\x1b[31m\x1b[2A\x1b]0;t\x07\nerror: y\u202e\u2066\x9b31m\x7f\udce9"


def _steers(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if not line.isprintable() or line.startswith("error: y")]


@pytest.mark.parametrize("form", [[], ["--json"]])
@pytest.mark.parametrize("reader", [*READERS.values(), ["runs", "compare", "runs/a", "runs/b"]])
def test_what_others_have_written_does_not_steer_the_terminal(run: Path, reader: list[str], form: list[str]) -> None:
    records = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    records[0]["rows"] = {NASTY: 8}
    records.append(
        {"kind": "decision", "attempt": 1, "first_step": 1, "last_step": 2, "action": NASTY, "reason": NASTY}
    )
    (run / "ledger.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    attempt = json.loads((run / "attempts/001/attempt.json").read_text()) | {"outcome": NASTY, "host": NASTY}
    (run / "attempts/001/attempt.json").write_text(json.dumps(attempt))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "attempt": 1, NASTY: 1.0, "train/loss": 1.0}) + "\n")
    shutil.copytree(run, run.with_name(NASTY.replace("/", "")))
    config = yaml.safe_load((run / "config.yaml").read_text()) | {"name": NASTY.encode("utf-8", "replace").decode()}
    shutil.copytree(run, run.with_name("b"))
    (run.with_name("b") / "config.yaml").write_text(yaml.safe_dump(config))
    code, printed = headway_in_copy(*reader, *form)
    assert code in (0, 2, 4) and "Traceback" not in printed
    assert not _steers(printed)


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_nor_do_documents_and_tokens(tmp_path: Path, form: list[str]) -> None:
    text = NASTY.removesuffix("\udce9")
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": f"{text} {n}"}) + "\n" for n in range(50)))
    data = {
        "sources": [{"path": str(tmp_path / "text.jsonl"), "name": "s"}],
        "store": str(tmp_path / "store"),
        "tokenizer": {"vocab_size": 300},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"name": "a", "data": data}))
    for command in (
        ["data", "prepare", tmp_path / "c.yaml"],
        ["data", "inspect", tmp_path / "store"],
        ["tokenizer", "inspect", tmp_path / "store" / "tokenizer", "--text", text],
    ):
        code, printed = headway_in_copy(*command, *form)
        assert code == 0, printed
        assert not [line for line in printed.splitlines() if not line.replace("\t", "").isprintable()]
