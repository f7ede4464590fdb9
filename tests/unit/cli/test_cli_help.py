"""Help of the command line: a first week's verbs, examples without a checkout, words for values, what comes next."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from headway.cli.application import FIRST_WEEK, VERBS, application
from headway.cli.next_steps import STEPS, followed
from headway.config.loading.complaints import known_keys


def run(*words: str) -> str:
    result = CliRunner().invoke(application(), list(words), env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return result.output


def verbs(command: Any = None, name: str = "") -> Iterator[tuple[str, Any]]:
    command = command or typer.main.get_command(application())
    for below, child in getattr(command, "commands", {}).items():
        path = f"{name} {below}".strip()
        yield path, child
        yield from verbs(child, path)


def listed(page: str) -> set[str]:
    return {found[1] for found in re.finditer(r"^│ (\w+) ", page, re.MULTILINE)}


def test_help_shows_a_first_weeks_verbs_and_where_the_rest_is() -> None:
    page = run("-h")
    assert listed(page) == set(FIRST_WEEK) and len(FIRST_WEEK) == 10
    assert "headway help" in " ".join(page.split())
    assert listed(run("help")) == set(VERBS)
    assert "--minutes" in run("help", "train")


def test_the_guide_lists_all_verbs() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guide.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`headway .*?) \|", guide.partition("## All verbs")[2], re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`headway (\w+)", row)} >= set(VERBS)


def test_lists_show_the_first_line_of_each_verbs_help() -> None:
    commands = typer.main.get_command(application()).commands  # type: ignore[attr-defined]
    shown = {name: (command.help or "").splitlines()[0] for name, command in commands.items()}
    assert all(line.startswith(VERBS[name].summary) for name, line in shown.items()) and set(shown) == set(VERBS)


def test_lists_of_verbs_load_none() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "headway", "-h"]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "headway.cli.application" in loaded and "headway.cli.start.train" not in loaded
    assert "headway.config" not in loaded, "most of the time of such a list"


def test_examples_fit_80_columns_and_need_no_checkout() -> None:
    seen = 0
    for name, command in verbs():
        for line in (command.help or "").splitlines():
            if re.match(r"\s*(headway|echo|cat|srun|torchrun) \S*.*[^.:,]$", line) and "SUITE [" not in line:
                seen += 1
                assert len(line.strip()) <= 78, f"{name}: {line}"
                assert "configs/" not in line, name
    assert seen > 100


def test_values_of_options_are_named_by_words() -> None:
    page = run("generate", "-h")
    assert "--step" in page and "STEP" in page and "<int>" not in page and "<float>" not in page


def test_presets_are_named_where_a_config_is_asked_for() -> None:
    for verb in ("train", "verify", "plan"):
        assert "cpt-24gb-qlora" in run(verb, "-h").replace("\n", "")


def test_what_comes_next_is_of_verbs_that_there_are() -> None:
    known = {name for name, _ in verbs()}
    assert known.issuperset(STEPS)
    for steps in STEPS.values():
        for command, _ in steps:
            words = [word for word in command.split() if re.fullmatch(r"[a-z]+", word)]
            assert words[0] in known, command


def test_a_verb_ends_with_what_comes_next_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = followed("config check", lambda **words: None)
    done(config="my.yaml", overrides=["name=a b"])
    assert capsys.readouterr().err == ""  # no terminal
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    done(config="my.yaml", overrides=["name=a b"])
    said = capsys.readouterr().err
    assert "headway train my.yaml 'name=a b'" in said
    done(config=None, overrides=None)
    assert "train" not in capsys.readouterr().err  # nothing that was not given


def test_a_key_is_explained_with_type_default_and_an_example() -> None:
    page = run("config", "explain", "train.steps")
    assert "Optimizer steps" in page and "type     count" in page and "default  not set" in page
    assert "example  train.steps=1000" in page
    assert "model.adapter.alpha=" in run("config", "explain", "lora_alpha")
    assert "schedule.warmup" in run("config", "explain", "schedule")


def test_every_key_can_be_explained() -> None:
    from headway.config.loading.reference import explain

    assert [key for key in known_keys() if not explain(key)] == []
