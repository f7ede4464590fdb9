"""`headway init`: names and folders that are refused, what is rendered, and what an update keeps."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from headway.cli.application import application
from headway.clouds.launchers.wheel import WHEEL
from headway.clouds.scaffold.answers import LICENCES, PARTS, Answers, check_name, parse_parts
from headway.clouds.scaffold.history import BUNDLE, UNPACKED, git
from headway.clouds.scaffold.project import ANSWERS, make_project, read_answers, update_project
from headway.clouds.scaffold.rendering import TEMPLATE, render
from headway.core.errors import ConfigError


def rendered(folder: Path, *parts: str, licence: str = "MIT") -> Path:
    """The files of the template alone: no wheel, no repository, no lock."""
    render(Answers("my-lab", parts, licence), folder)
    return folder


def files(folder: Path) -> set[str]:
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in found if ".git" not in path.parts}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rendered(tmp_path_factory.mktemp("whole"), *PARTS)


@pytest.mark.parametrize(
    "name", ["My Lab", "1lab", "my--lab", "json", "class", "torch", "headway", "x" * 41, "my_lab-"]
)
def test_a_name_that_something_cannot_bear_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_name(name)
    better = str(refused.value.fix).removeprefix("headway init ")
    assert check_name(better) == better


def test_an_unknown_part_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no part 'doker'") as refused:
        parse_parts("doker,github")
    assert "did you mean 'docker'?" in str(refused.value.fix)
    assert parse_parts("github, docker") == ("docker", "github")
    assert parse_parts("all") == PARTS and parse_parts("") == ()


def test_the_verb_refuses_a_folder_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "my-lab").mkdir()
    kept = tmp_path / "my-lab" / "thesis.txt"
    kept.write_text("years", encoding="utf-8")
    done = CliRunner().invoke(application(["init"]), ["init", str(tmp_path / "my-lab")])
    assert isinstance(done.exception, ConfigError) and "not empty" in done.exception.what
    assert files(tmp_path) == {"my-lab/thesis.txt"}


def test_parts_decide_which_files_there_are(tmp_path: Path, whole: Path) -> None:
    plain = files(rendered(tmp_path / "plain"))
    assert {"pyproject.toml", "Makefile", "README.md", "LICENSE", "src/my_lab/task.py", "configs/smoke.yaml"} <= plain
    assert plain < files(whole)
    only = {part: files(rendered(tmp_path / part, part)) - plain for part in PARTS}
    assert only["kubernetes"] == {"configs/kubernetes.yaml"}
    both = {".github/workflows/image.yml"}  # images are built by workflows where there are both
    assert files(whole) == plain.union(both, *only.values())


def test_every_file_parses_and_no_template_is_left(whole: Path) -> None:
    for path in (whole / name for name in files(whole)):
        text = path.read_text(encoding="utf-8")
        assert "{%" not in text and not path.name.endswith(".jinja"), path
        if path.suffix in (".yaml", ".yml"):
            list(yaml.safe_load_all(text))
        elif path.suffix == ".toml":
            tomllib.loads(text)
        elif path.suffix == ".py":
            compile(text, str(path), "exec")


def test_the_rendered_code_passes_its_own_linter(whole: Path) -> None:
    for words in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *words, "--no-cache", "."], cwd=whole, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("licence", LICENCES)
def test_the_licence_is_in_its_file_and_in_the_metadata(licence: str, tmp_path: Path) -> None:
    folder = rendered(tmp_path, licence=licence)
    named = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["license"]
    assert named.lower().endswith(licence.lower())
    begin = {"MIT": "MIT License", "Apache-2.0": "Apache License", "BSD-3-Clause": "BSD 3-Clause License"}
    text = (folder / "LICENSE").read_text(encoding="utf-8")
    assert text.strip().startswith(begin.get(licence, "Copyright (c) The my-lab authors. All rights reserved."))


def test_the_tests_of_the_project_pass(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "my-lab")
    (folder / "vendor" / WHEEL).touch()  # a target names it
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:]


def commit(folder: Path, message: str) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", message)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with its history, committed, without the lock file, which takes an index of packages."""
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "no-cache"))
    folder = tmp_path / "my-lab"
    undone = make_project(Answers("my-lab"), folder)
    assert len(undone) == 1 and "make lock" in undone[0]
    commit(folder, "As headway init made it")
    return folder


def later_template(folder: Path) -> Path:
    """A template in which one file has other lines, one is new, and one is gone."""
    shutil.copytree(TEMPLATE, folder)
    makefile = folder / "project" / "Makefile.jinja"
    text = makefile.read_text(encoding="utf-8")
    assert text.count("\nclean:\n") == 1
    makefile.write_text(text.replace("\nclean:\n", "\nlater:\n\t@echo later\n\nclean:\n"), encoding="utf-8")
    (folder / "project" / "NEW.md").write_text("new\n", encoding="utf-8")
    (folder / "project" / "corpus" / "make_sample.py.jinja").unlink()
    return folder


def test_an_update_keeps_what_was_changed_and_brings_what_is_new(made: Path, tmp_path: Path) -> None:
    makefile = made / "Makefile"
    text = makefile.read_text(encoding="utf-8")
    makefile.write_text(text.replace("PYTHON ?= python3", "PYTHON ?= python3.12"), encoding="utf-8")
    (made / "src" / "my_lab" / "losses.py").write_text("ours = 1\n", encoding="utf-8")
    (made / "README.md").unlink()
    commit(made, "Ours")
    clone = tmp_path / "colleague"  # who has never run `headway init`
    git(tmp_path, "clone", "--quiet", str(made), str(clone))
    answers, conflicts, _ = update_project(clone, ["docker"], later_template(tmp_path / "later"))
    assert not conflicts and answers.parts == ("docker",) == read_answers(clone).parts
    text = (clone / "Makefile").read_text(encoding="utf-8")
    assert "PYTHON ?= python3.12" in text and "\nlater:\n" in text
    assert (clone / "src" / "my_lab" / "losses.py").read_text(encoding="utf-8") == "ours = 1\n"
    assert (clone / "NEW.md").is_file() and not (clone / "corpus" / "make_sample.py").exists()
    assert not (clone / "README.md").exists(), "a file that the team removed came back"
    assert not (clone / UNPACKED).exists() and (clone / BUNDLE).is_file()
    commit(clone, "Updated")
    _, conflicts, _ = update_project(clone, [], TEMPLATE)  # the third generation, from the packed second
    assert not conflicts and (clone / "corpus" / "make_sample.py").is_file() and not (clone / "NEW.md").exists()
    assert '_commit: "3"' in (clone / ANSWERS).read_text(encoding="utf-8")


def test_lines_that_both_changed_are_marked(made: Path, tmp_path: Path) -> None:
    makefile = made / "Makefile"
    text = makefile.read_text(encoding="utf-8")
    makefile.write_text(text.replace("\nclean:\n", "\nclean: ours\n"), encoding="utf-8")
    commit(made, "Ours")
    _, conflicts, _ = update_project(made, [], later_template(tmp_path / "later"))
    assert conflicts == ["Makefile"]
    text = makefile.read_text(encoding="utf-8")
    assert "clean: ours" in text and "\nlater:\n" in text and "<<<<<<<" in text


def test_an_update_by_the_same_template_changes_nothing(made: Path) -> None:
    update_project(made, [])
    assert git(made, "status", "--porcelain") == ""


def test_an_update_refuses_what_is_not_committed_and_changes_nothing(made: Path) -> None:
    (made / "configs" / "mine.yaml").write_text("base: quickstart\n", encoding="utf-8")
    before = git(made, "status", "--porcelain")
    with pytest.raises(ConfigError, match="not committed"):
        update_project(made, ["docker"])
    assert git(made, "status", "--porcelain") == before


def test_an_update_refuses_a_folder_of_somebody_else(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no project of headway init"):
        update_project(tmp_path, [])


def test_the_same_template_gives_the_same_generation(tmp_path: Path, made: Path) -> None:
    again = tmp_path / "again" / "my-lab"
    make_project(Answers("my-lab"), again)
    heads = [git(folder, "bundle", "list-heads", str(BUNDLE)) for folder in (made, again)]
    assert heads[0] == heads[1] and "refs/tags/1" in heads[0]


def test_the_wheel_in_the_project_has_the_template(made: Path, tmp_path: Path) -> None:
    """Or a later `headway init --update` from the project's own environment would have none."""
    (wheel,) = (made / "vendor").glob("headway-*.whl")
    shutil.unpack_archive(wheel, tmp_path / "wheel", "zip")
    assert files(tmp_path / "wheel" / "headway" / "clouds" / "scaffold" / "template") == {
        name for name in files(TEMPLATE) if "__pycache__" not in name
    }
