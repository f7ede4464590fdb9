"""Commands that messages suggest are the user's own: their config, with all their overrides."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import headway
from headway.cli.application import VERBS, application
from headway.cli.start.quickstart import _next_commands
from headway.config import load_config
from headway.core.errors import HeadwayError
from headway.core.user_command import VARIABLE, remember_config, suggest
from support.runs import write_config

#: Overrides of the user, of which one needs quotes.
OWN = ("train.steps=7", "model.dropout=0.25", "telemetry.alert=echo 'two words'")
QUOTED = "train.steps=7 model.dropout=0.25 'telemetry.alert=echo '\"'\"'two words'\"'\"''"

#: A verb whose messages name the config, and what makes it print one.
PRINTS = {
    "plan": ["plan", "--gpus", "8xH100"],
    "train": ["train", "--dry-run"],
    "profile": ["profile", "--steps", "2", "--warmup", "1"],
    "data inspect": ["data", "inspect"],
    "data preview": ["data", "preview", "--step", "1"],
    "data report": ["data", "report"],
    "data verify": ["data", "verify"],
    "tokenizer train": ["tokenizer", "train"],
}
#: Verbs that name no config in what they print: they take runs, stores and folders, or print no command.
NO_CONFIG = {
    "models", "merge", "bench", "benchmark", "eval", "generate", "chat", "export", "checkpoints", "runs", "ledger",
    "report", "top", "ui", "track", "dashboards", "alerts", "prices", "cost", "spot", "launch", "compress", "push",
    "help", "registry", "init", "audit", "tune", "image", "sbom", "serve", "compare",
}  # fmt: skip
#: Trainings of these verbs are children, which keep the words (the test below); these print no command of their own.
TRAINS = {"verify", "chaos"}
#: The command of a finding is held by the test of `suggest`; that of the quickstart by its own test below.
ELSEWHERE = {"doctor", "config", "quickstart"}


@pytest.mark.parametrize("verb", PRINTS)
def test_every_command_that_names_the_config_has_all_overrides(verb: str, tmp_path: Path) -> None:
    # Nothing to learn from, and no store; the dry run looks into the text.
    (tmp_path / "corpus.jsonl").write_text('{"text": "some"}\n' if verb == "train" else "")
    config = write_config(tmp_path, train={"global_batch": 16}, data={"store": str(tmp_path / "none")})
    words = PRINTS[verb]
    result = CliRunner().invoke(application([words[0]]), [*words, str(config), *OWN])
    said = result.output + (result.exception.render() if isinstance(result.exception, HeadwayError) else "")
    commands = [line for line in said.splitlines() if re.search(rf"headway [a-z ]+{re.escape(str(config))}", line)]
    assert commands, f"no command in: {said}"
    for line in commands:
        assert f"{config} {QUOTED}" in line, line


def test_every_verb_is_accounted_for() -> None:
    covered = {verb.split()[0] for verb in PRINTS} | NO_CONFIG | TRAINS | ELSEWHERE
    assert covered == set(VERBS)


def test_the_quickstart_suggests_its_own_overrides(tmp_path: Path) -> None:
    config = load_config("quickstart", [f"runs={tmp_path}", *OWN])
    commands = [line for line, _ in _next_commands(config, [*OWN]) if " quickstart" in line]
    verify, longer = commands
    assert f"quickstart {QUOTED}" in verify
    assert f"quickstart {QUOTED.removeprefix('train.steps=7 ')} name=longer" in longer and "train.steps=7" not in longer


def test_a_library_has_no_command_line_and_a_child_keeps_its_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    assert suggest("data prepare", "--repair") == "headway data prepare --repair with the config of the run"
    assert suggest("train", "parallel.threads=2", unknown="...") == "headway train ... parallel.threads=2"
    remember_config("my.yaml", OWN)
    assert suggest("train", "parallel.threads=2", unknown="...") == f"headway train my.yaml {QUOTED} parallel.threads=2"
    remember_config("/tmp/scratch/config.yaml", ["name=reference"])
    assert suggest("data prepare", "--repair") == f"headway data prepare my.yaml {QUOTED} --repair"
    monkeypatch.delenv(VARIABLE)
    remember_config("my.yaml", ["checkpoint.remote.options.secret=hunter2hunter2"])
    assert "hunter2" not in os.environ[VARIABLE]


def _messages() -> Iterator[tuple[str, str]]:
    """Yield the texts in the source that are not documentation."""
    for file in Path(headway.__file__).parent.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if not re.search(r"headway [a-z ]+CONFIG\b|headway data prepare", text):
            continue
        tree = ast.parse(text)
        nodes = list(ast.walk(tree))
        documentation = {node.value for node in nodes if isinstance(node, ast.Expr)}
        documentation |= {node.value for node in nodes if isinstance(node, ast.Assign)}  # help pages
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in documentation:
                yield str(file), node.value


def test_no_message_leaves_the_config_to_be_filled_in() -> None:
    for file, text in _messages():
        assert not re.search(r"headway [a-z ]+ CONFIG\b", text), f"{file}: {text}"
        if re.search(r"\bheadway data prepare\b", text):
            pytest.fail(f"{file} spells a command that headway.core.user_command.suggest writes: {text}")
