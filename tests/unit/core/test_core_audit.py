"""Audit logs: what a check finds in a log that was changed, cut or written anew."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.core.audit import Anchor, AuditLog, Head, check_log
from support.runs import in_child

Lines = list[bytes]


@pytest.fixture
def log(tmp_path: Path) -> AuditLog:
    """A log of six lines."""
    log = AuditLog(tmp_path / "audit.jsonl")
    for number in range(1, 7):
        assert log.append("train", attempt=number).lines == number
    return log


def problems(lines: Lines, *anchors: Anchor) -> str:
    return "; ".join(check_log(lines, anchors).problems)


def anchor(log: AuditLog) -> Anchor:
    assert log.name is not None
    return Anchor(log.name, log.head(), 1_700_000_000.0, "node-0")


def chained(records: list[dict[str, Any]]) -> Lines:
    """The chain as docs/audit.md describes it, computed by other code."""
    lines, before = [], "0" * 64
    for number, record in enumerate(records, 1):
        body = json.dumps({"number": number, **record, "previous": before}, separators=(",", ":"))[:-1]
        before = hashlib.sha256(body.encode()).hexdigest()
        lines.append(f'{body},"sha256":"{before}"}}'.encode())
    return lines


def test_a_line_says_who_when_and_from_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "192.0.2.7 50022 192.0.2.1 22")
    monkeypatch.setenv("USER", "somebody-else")
    monkeypatch.setenv("LOGNAME", "somebody-else")
    log = AuditLog(tmp_path / "log")
    log.append("push", command="headway push a b --token hf_abcdefghijklmnopqrstuvwx")
    (line,) = map(json.loads, log.lines())
    assert line["user"] != "somebody-else" and line["host"] and line["from"] == "192.0.2.7" and line["time"] > 1e9
    assert line["command"] == "headway push a b --token ***"


def test_the_chain_is_the_one_that_is_described(log: AuditLog) -> None:
    lines = list(log.lines())
    kept = [json.loads(line) for line in lines]
    bare = [{k: v for k, v in one.items() if k not in ("number", "previous", "sha256")} for one in kept]
    assert chained(bare) == lines
    assert check_log(lines).head == log.head() and problems(lines) == ""


@pytest.mark.parametrize("at", range(6))
def test_a_changed_line_is_found(log: AuditLog, at: int) -> None:
    lines = list(log.lines())
    lines[at] = lines[at].replace(b'"attempt":', b'"attempt":1')
    assert f"line {at + 1} was changed" in problems(lines)
    # Whoever also makes its own hash right breaks the line behind it.
    body = lines[at].partition(b',"sha256"')[0]
    lines[at] = body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}'
    found = problems(lines, anchor(log))
    wanted = "line 6 is not the one that was anchored" if at == 5 else f"line {at + 2} does not continue"
    assert wanted in found


@pytest.mark.parametrize("change", [lambda lines: lines.pop(2), lambda lines: lines.insert(2, lines[1])])
def test_a_line_removed_or_inserted_is_found(log: AuditLog, change: Callable[[Lines], object]) -> None:
    lines = list(log.lines())
    change(lines)
    assert "line 3 does not continue the line before it" in problems(lines)


def test_a_line_of_another_writer_is_found(log: AuditLog) -> None:
    with log.path.open("a") as file:
        file.write('{"time":1,"user":"a","action":"train"}\n')
    assert "line 7 was written by something else" in problems(list(log.lines()))
    log.append("train")
    assert "line 7 was written by something else" in problems(list(log.lines()))


def test_only_an_anchor_sees_a_cut_end_and_a_new_chain(log: AuditLog) -> None:
    kept = anchor(log)
    lines = list(log.lines())
    assert problems(lines[:4]) == "" and "line 6 was anchored" in problems(lines[:4], kept)
    records = [json.loads(line) for line in lines]
    records[3]["user"] = "nobody"
    rewritten = chained(
        [{k: v for k, v in one.items() if k not in ("number", "previous", "sha256")} for one in records]
    )
    assert problems(rewritten) == "" and "line 6 is not the one that was anchored" in problems(rewritten, kept)
    log.append("train")
    report = check_log(log.lines(), [kept])
    assert not report.problems and report.anchored == 6 and report.head.lines == 7


def test_a_line_that_was_cut_off_is_kept_and_covered(log: AuditLog) -> None:
    with log.path.open("ab") as file:
        file.write(b'{"number":7,"time":17')
    log.append("train", attempt=8)
    lines = list(log.lines())
    report = check_log(lines)
    assert len(lines) == 8 and not report.problems and "line 7 has no hash" in report.notes[0]
    lines[6] = b'{"number":7,"time":18'
    assert "line 8 does not continue" in problems(lines)


def test_lines_without_hashes_at_the_start_are_covered(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "log")
    log.path.write_text('{"action":"launch"}\n{"action":"cancel"}\n')
    assert log.append("train").lines == 3
    lines = list(log.lines())
    assert not check_log(lines).problems and len(check_log(lines).notes) == 2
    lines[0] = b'{"action":"nothing"}'
    assert "line 3 does not continue" in problems(lines)


def test_writers_at_the_same_time_make_one_chain(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "log")
    children = []
    for writer in range(4):
        pid = os.fork()
        if pid == 0:
            for number in range(10):
                log.append("train", writer=writer, number_of_writer=number)
            os._exit(0)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
    report = check_log(log.lines())
    assert report.head.lines == 40 and not report.problems and not report.notes


def test_a_full_disk_leaves_no_half_line(log: AuditLog, monkeypatch: pytest.MonkeyPatch) -> None:
    before = log.path.read_bytes()

    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        log.append("train")
    assert log.path.read_bytes() == before


def test_foreign_content_is_a_problem_not_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "log"
    deep = b"[" * 5000 + b"]" * 5000
    for content in (
        b"\0" * 100,
        b"\xff\xfe\n" * 3,
        deep,
        b'{"number":1e999}\n',
        b'{"number":true,"previous":3}',
        b"x" * 2**23,
    ):
        path.write_bytes(content)
        assert check_log(AuditLog(path).lines()).notes
        AuditLog(path).append("train")
        assert not check_log(AuditLog(path).lines()).problems
    path.unlink()
    os.mkfifo(path)
    assert in_child(lambda: AuditLog(path).append("train")) == 1, "it does not wait for a reader"


def test_an_empty_log_has_no_name(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "none")
    assert log.name is None and log.head() == Head() and not check_log(log.lines()).problems
    log.append("train")
    assert log.name is not None and re.fullmatch("[0-9a-f]{16}", log.name)
    name = log.name
    log.append("train")
    assert log.name == name
