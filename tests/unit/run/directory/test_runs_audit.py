"""The audit log of a run: which commands leave a line, its anchors in the remote tier, and `headway audit`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from headway.checkpoint.remote.acquire import acquire_tier
from headway.checkpoint.remote.audit_anchor import audit_place, read_anchors
from headway.checkpoint.run_identity import run_identity
from headway.cli.application import application
from headway.cli.auditing import CHANGES, RECORDED_BELOW, recorded
from headway.config import Config, RemoteConfig, TrainConfig, dump_config
from headway.core.audit import AUDIT_FILE, AuditLog
from headway.core.errors import CheckpointError
from headway.run.directory.audit import check_audit, move_log, record
from headway.run.directory.run_directory import RunDirectory
from support.runs import headway, write_config, write_corpus

#: Verbs that take a run and leave it as it is.
READ = {
    "audit show", "audit verify", "tokenizer extend", "runs metrics", "runs show", "runs compare", "report",
    "checkpoints list",
    "checkpoints verify", "checkpoints diff", "ledger", "top", "ui", "track", "track export", "launch status",
    "launch logs", "launch wait", "launch serve",
    "models", "eval", "benchmark", "generate", "chat", "serve run", "chaos drill", "cost show", "alerts check",
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run with a remote tier, which two commands have had."""
    run = RunDirectory(tmp_path / "runs" / "tiny")
    (tmp_path / "remote").mkdir()
    remote = {"url": f"file://{tmp_path}/remote"}
    config = Config(name="tiny", train=TrainConfig(steps=4), checkpoint={"remote": remote})
    for number in (1, 2):
        attempt = run.begin_attempt("headway train")
        run.config_path.write_text(dump_config(config))
        run.record_path.write_text(json.dumps({"id": "ab" * 16}))
        acquire_tier(RemoteConfig(**remote), number, run_identity(config, run=run.path))
        attempt.finish("finished", 0)
    return run


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in AuditLog(run / AUDIT_FILE).lines()]


def rewrite(run: Path, kept: int, **changes: Any) -> None:
    """Write the log anew from its first lines, with a chain that is right."""
    old = lines(run)[:kept]
    (run / AUDIT_FILE).unlink()
    for line in old:
        action = line.pop("action")
        facts = {k: v for k, v in line.items() if k not in ("number", "previous", "sha256", "time", "user", "host")}
        AuditLog(run / AUDIT_FILE).append(action, **{**facts, **changes})


def invoke(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(application(), list(map(str, words)))
    code = result.exception.exit_code if isinstance(result.exception, CheckpointError) else result.exit_code
    return code, result.output


def test_a_command_leaves_one_line_for_all_its_attempts(run: RunDirectory) -> None:
    assert [(line["action"], line["attempt"], line["command"]) for line in lines(run.path)] == [
        ("train", 1, "headway train"),
        ("train", 2, "headway train"),
    ]
    run.begin_attempt("headway train", restarts=1).finish("finished", 0)
    assert len(lines(run.path)) == 2


def test_an_intact_log_agrees_with_its_anchors(run: RunDirectory) -> None:
    found = check_audit(run.path)
    assert not found.report.problems and found.report.anchored == 2 and found.unseen == ""
    record(run.path, "export")
    assert "no anchor vouches for what follows line 2" in check_audit(run.path).unseen
    record(run.path, "export", anchors=True)
    assert check_audit(run.path).report.anchored == 4
    code, printed = invoke("audit", "verify", run.path)
    assert code == 0 and "anchored at file://" in printed and "up to line 4" in printed


def test_a_cut_end_is_found_by_the_anchor(run: RunDirectory) -> None:
    path = run.path / AUDIT_FILE
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    code, printed = invoke("audit", "verify", run.path)
    assert code == 4 and "the log ends after line 1, and line 2 was anchored at" in printed, printed
    # It stays visible when the run goes on.
    record(run.path, "export", anchors=True)
    assert "line 2 is not the one that was anchored" in check_audit(run.path).report.problems[0]


def test_a_new_chain_is_found_by_the_anchor(run: RunDirectory) -> None:
    rewrite(run.path, 2, attempt=7)
    found = check_audit(run.path)
    assert "this one was written anew, or replaces one that was lost" in found.report.problems[0]
    assert invoke("audit", "verify", run.path, "--json")[0] == 4


def test_a_loss_that_is_acknowledged_becomes_a_note(run: RunDirectory) -> None:
    path = run.path / AUDIT_FILE
    words = ("audit", "verify", run.path, "--acknowledge", "the disk of node 7")
    code, printed = invoke(*words)
    assert code == 4, "there is nothing to acknowledge"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    record(run.path, "export", anchors=True)
    assert invoke("audit", "verify", run.path)[0] == 4
    code, printed = invoke(*words)
    assert code == 0 and "what was anchored up to line 2 is lost: acknowledged at " in printed, printed
    last = lines(run.path)[-1]
    assert (last["action"], last["reason"], len(last["lost"])) == ("audit acknowledge", "the disk of node 7", 1)
    code, printed = invoke("audit", "verify", run.path)
    assert code == 0 and "(the disk of node 7)" in printed and "up to line 3" in printed, printed
    # A later loss, which takes the acknowledgement along, is one again.
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    assert invoke("audit", "verify", run.path)[0] == 4


def test_a_lost_log_is_acknowledged_and_a_changed_line_is_not(run: RunDirectory) -> None:
    rewrite(run.path, 2, attempt=7)
    code, printed = invoke("audit", "verify", run.path, "--acknowledge", "a new disk")
    assert code == 0 and "(a new disk)" in printed, printed
    path = run.path / AUDIT_FILE
    path.write_bytes(path.read_bytes().replace(b'"attempt":7', b'"attempt":8', 1))
    code, printed = invoke("audit", "verify", run.path)
    assert code == 4 and "line 1 was changed" in printed, printed


def test_without_a_remote_tier_the_report_says_what_is_unseen(run: RunDirectory) -> None:
    run.config_path.write_text(dump_config(Config(name="tiny", train=TrainConfig(steps=4))))
    rewrite(run.path, 1)
    code, printed = invoke("audit", "verify", run.path)
    assert code == 0 and "nothing shows whether its end was cut" in printed, printed


def test_the_log_of_another_folder_is_a_note(run: RunDirectory, tmp_path: Path) -> None:
    other = tmp_path / "laptop" / "runs" / "tiny"
    other.mkdir(parents=True)
    shutil.copy(run.config_path, other)
    record(other, "launch", anchors=True)
    found = check_audit(run.path).report
    assert not found.problems and "as by a launch from another folder" in found.notes[0]


def test_an_anchor_is_never_written_again(run: RunDirectory, tmp_path: Path) -> None:
    place = audit_place(RemoteConfig(url=f"file://{tmp_path}/remote"), run.path)
    before = {anchor.head.lines: anchor for anchor in read_anchors(place)}
    for file in (tmp_path / "remote" / "tiny" / "audit").rglob("*.json"):
        file.with_name("00000009-0123456789abcdef.json").write_text("{}")  # foreign ones are passed over
    acquire_tier(RemoteConfig(url=f"file://{tmp_path}/remote"), 3, run_identity(Config(name="tiny"), run=run.path))
    assert {anchor.head.lines: anchor for anchor in read_anchors(place)} == before and len(before) == 2


def test_trouble_with_the_log_is_one_warning(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    (run.path / AUDIT_FILE).unlink()
    (run.path / AUDIT_FILE).mkdir()
    run.begin_attempt("headway train").finish("finished", 0)
    run.begin_attempt("headway train").finish("finished", 0)
    assert capsys.readouterr().err.count("gets no line for 'train'") == 1


def test_an_unreachable_tier_is_a_warning(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(tmp_path / "remote")
    text = run.config_path.read_text()
    run.config_path.write_text(text.replace(f"file://{tmp_path}/remote", f"file://{tmp_path}/nowhere/remote"))
    record(run.path, "export", anchors=True)
    assert lines(run.path)[-1]["action"] == "export"
    assert "line 3 of the audit log is not anchored" in capsys.readouterr().err


def test_a_log_stays_with_the_name_of_its_run(run: RunDirectory) -> None:
    moved = run.archive()
    assert moved is not None
    move_log(moved, run.path)
    assert len(lines(run.path)) == 2 and not (moved / AUDIT_FILE).exists()
    run.claim().release()


def test_a_verb_writes_its_line_before_it_begins(run: RunDirectory) -> None:
    seen: list[int] = []

    def verb(**arguments: Any) -> None:
        seen.append(len(lines(run.path)))
        raise ValueError

    for name, arguments, wanted in (
        ("checkpoints prune", {"run": run.path, "dry_run": True}, 2),
        ("checkpoints prune", {"run": run.path, "dry_run": False}, 3),
        ("runs tag", {"paths": [run.path], "add": None, "remove": None, "note": None}, 3),
        ("runs tag", {"paths": [run.path], "add": ["a"], "remove": None, "note": None}, 4),
        ("push", {"model": run.path.parent, "dry_run": False}, 4),
        ("checkpoints copy", {"source": str(run.checkpoints)}, 5),
        ("runs show", {"run": run.path}, 5),
    ):
        with pytest.raises(ValueError, match=r"^$"):
            recorded(name, verb)(**arguments)
        assert seen[-1] == wanted, name
    assert not (run.path.parent / AUDIT_FILE).exists()


def verbs(command: Any = None, name: str = "") -> Iterator[tuple[str, Any]]:
    command = command or typer.main.get_command(application())
    below = getattr(command, "commands", None)
    if below is None:
        yield name, command
    for word, child in (below or {}).items():
        yield from verbs(child, f"{name} {word}".strip())


def test_every_verb_on_a_run_says_whether_it_changes_it() -> None:
    """A new verb that takes a run stands in `CHANGES`, in `RECORDED_BELOW`, or above in `READ`."""
    known = dict(verbs())
    assert {*CHANGES, *RECORDED_BELOW} <= known.keys()
    for verb, argument in CHANGES.items():
        assert argument in {option.name for option in known[verb].params}, verb
    takes = {name for name, verb in known.items() if any("RUN" in (p.metavar or "") for p in verb.params)}
    takes |= {name for name, verb in known.items() if any(p.name == "model" for p in verb.params)}
    assert takes - {*CHANGES, *RECORDED_BELOW} <= READ, takes - {*CHANGES, *RECORDED_BELOW} - READ


def test_a_training_and_what_follows_make_one_chain(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    (tmp_path / "remote").mkdir()
    remote = {"every": "2 steps", "remote": {"url": f"file://{tmp_path}/remote"}}
    config = write_config(tmp_path, checkpoint=remote)
    run = tmp_path / "runs" / "tiny"
    for words in (
        ("train", config, "train.steps=4"),
        ("train", config, "optimizer.learning_rate=0.02", "--accept-changes", "train.steps=6"),
        ("checkpoints", "prune", run, "--keep", "1"),
        ("checkpoints", "restore", run),
        ("runs", "tag", run, "--add", "kept"),
        ("export", run),
        ("train", config, "train.steps=4", "--restart"),
    ):
        done = headway(*words)
        assert done.returncode == 0, done.stderr
    found = lines(run)
    assert [line["action"] for line in found] == [
        "train", "accept changes", "train", "checkpoints prune", "checkpoints restore", "runs tag", "export",
        "restart", "train",
    ]  # fmt: skip
    assert "learning_rate" in found[1]["changes"][0]
    audit = check_audit(run)
    assert not audit.report.problems and audit.unseen == "", audit
    # Elsewhere the log goes on from what the newest checkpoint took along.
    shutil.rmtree(run)
    done = headway("train", config, "train.steps=4")
    assert done.returncode == 0, done.stderr
    assert [line["action"] for line in lines(run)] == [*(line["action"] for line in found), "train"]
    assert not check_audit(run).report.problems
