"""README, docs and help pages: configs load, commands and keys are known, links lead somewhere."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from rich.text import Text

from headway.cli.application import application
from headway.config import Config, load_config
from headway.config.loading.complaints import known_keys
from headway.config.loading.load import presets
from headway.lab.bench.suite import Suite, load_suite
from headway.lab.tune.settings import load_settings
from headway.lab.tune.space import parse_space

ROOT = Path(__file__).parents[2]
CONFIG_FILES = sorted((ROOT / "configs").glob("*.yaml"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
#: Verbs in whose place a word that names none stands for a subcommand: `headway bench SUITE`.
GROUPS_WITH_A_DEFAULT = {
    "bench": "run",
    "chaos": "run",
    "prices": "list",
    "launch": "run",
    "tune": "run",
    "serve": "run",
}


def blocks(page: Path) -> Iterator[tuple[int, str]]:
    """Code blocks of a page, fenced or indented, each with the number of its first line."""
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        first = number
        if lines[number].startswith("```"):
            while not lines[number + 1].startswith("```"):
                number += 1
            yield first + 2, "\n".join(lines[first + 1 : number + 1])
            number += 2
        elif lines[number].startswith("    ") and not (number and lines[number - 1].strip()):
            while number < len(lines) and (lines[number].startswith("    ") or not lines[number].strip()):
                number += 1
            yield first + 1, textwrap.dedent("\n".join(lines[first:number]))
        else:
            number += 1


#: Names of tensors and files that look like keys.
NO_KEY = ("model.embedding", "launch.json", "telemetry.metrics.")

#: Words under which a key is derived, no command.
NO_COMMAND = ("headway checkpoint file",)


def mappings() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Blocks that are YAML with keys: place, text, content."""
    for page in PAGES:
        for line, text in blocks(page):
            try:
                content = yaml.safe_load(text)
            except yaml.YAMLError:
                continue
            if isinstance(content, dict):
                yield f"{page.name}:{line}", text, content


SUITES = {place: text for place, text, content in mappings() if "strategy" in content}
SPACES = {place: text for place, text, content in mappings() if "space" in content}
CONFIGS = {
    place: text
    for place, text, content in mappings()
    if content.keys() & {"base", *Config.model_fields} and "output_type" not in content
    if place not in SUITES and place not in SPACES
}


def test_there_are_configs_in_docs() -> None:
    assert len(CONFIGS) >= 12 and len(SUITES) == 1, (sorted(CONFIGS), sorted(SUITES))


@pytest.mark.parametrize("place", CONFIGS)
def test_a_config_in_docs_is_one(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself, or on the preset that the pages begin with."""
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text("{}", encoding="utf-8")  # named by a page
    text = CONFIGS[place]
    is_whole = "base:" in text or "task:" in text
    Path("run.yaml").write_text(text if is_whole else f"base: quickstart\n{text}", encoding="utf-8")
    load_config("run.yaml")


def test_a_suite_in_docs_is_one(tmp_path: Path) -> None:
    file = tmp_path / "suite.yaml"
    for text in SUITES.values():
        file.write_text(text, encoding="utf-8")
        assert isinstance(load_suite(str(file), []), Suite)


def test_a_space_in_docs_is_one(tmp_path: Path) -> None:
    file = tmp_path / "space.yaml"
    base = {"optimizer.name": "adamw", "model.dim": 64, "model.heads": 4}
    for text in SPACES.values():
        file.write_text(text, encoding="utf-8")
        settings = load_settings(file, {})
        assert parse_space(settings.space, settings.constraints, base).ranges
    assert SPACES


def typed() -> Iterator[tuple[str, str]]:
    """Commands of blocks, with their places; one whose quotes are open goes on in the next line."""
    for page in PAGES:
        lines = page.read_text(encoding="utf-8").splitlines()
        for first, text in blocks(page):
            if lines[first - 2] == "```python":
                continue
            open_line = ""
            for number, line in enumerate(text.splitlines(), first):
                command = f"{open_line} {line.strip()}".strip()
                if line.endswith("\\") or command.count("'") % 2 or command.count('"') % 2:
                    open_line = command.removesuffix("\\")
                    continue
                open_line = ""
                found = re.search(r"(?:^|[\s|(])(headway [a-z].*)", command)
                if found and not re.match(r"#|error:", command):
                    yield f"{page.name}:{number}", found[1]


def helped(command: Any = None, name: str = "headway") -> Iterator[tuple[str, str]]:
    """Commands of help pages, with the command that they help with."""
    command = command or root()
    for line in (command.help or "").replace("\\\n", "").splitlines():
        if found := re.search(r"(?:^|-m |\| )(headway [a-z].*)", line.strip()):
            yield f"{name} -h", found[1]
    for below, child in getattr(command, "commands", {}).items():
        yield from helped(child, f"{name} {below}")


def mentioned() -> Iterator[tuple[str, str]]:
    """Commands in running text."""
    for page in PAGES:
        for found in re.finditer(r"`(headway [a-z][^`|,]*)`", re.sub(r"\s+", " ", page.read_text(encoding="utf-8"))):
            yield page.name, found[1]


def words_of(command: str) -> list[str]:
    """As a shell would hand them on, up to a pipe, a redirection or the next command."""
    words = shlex.split(re.sub(r'\)"$', "", command), comments=True)
    ends = [n for n, word in enumerate(words) if word in ("|", "||", "&&", ">", ";")]
    return words[1 : ends[0]] if ends else words[1:]


def helps(command: Any, name: str) -> Iterator[tuple[str, str]]:
    """Every text of help pages that may have markup, with the place where a page shows it."""
    for text in (command.help, command.short_help, command.epilog):
        if text:
            yield name, text
    for parameter in command.params:
        for text in (getattr(parameter, "help", None), parameter.metavar):
            if text:
                yield f"{name}: {parameter.name}", text
    for below, child in getattr(command, "commands", {}).items():
        yield from helps(child, f"{name} {below}")


def test_no_bracket_of_a_help_text_is_swallowed() -> None:
    """What is in brackets is taken for markup, and a page leaves it out: `[hf]` has to be written `\\[hf]`."""
    texts = list(helps(root(), "headway"))
    assert len(texts) > 300
    for place, text in texts:
        shown = Text.from_markup(text).plain
        for bracket in set(re.findall(r"\[[^\]]*\]", text)) - {"[bold]", "[/bold]"}:
            assert bracket in shown, f"{place}: {bracket}"


@cache
def root() -> Any:
    return typer.main.get_command(application())


def parse(words: list[str]) -> tuple[str, Any]:
    """The verb and its context, as the command line makes it; its function is not called."""
    command, context = root(), root().make_context("headway", [], resilient_parsing=True)
    verbs: list[str] = []
    while hasattr(command, "commands"):
        verb = words[0] if words else "-h"
        if verb not in command.commands:
            verb, words = GROUPS_WITH_A_DEFAULT.get(verbs[-1] if verbs else "", verb), ["", *words]
        command, words = command.commands[verb], words[1:]
        verbs.append(verb)
    return " ".join(verbs), command.make_context(verbs[-1], list(words), parent=context)


def refuse_unknown_keys(verb: str, words: list[str]) -> None:
    known = {*known_keys(), *(known_keys(Suite) if verb in ("bench run", "launch bench") else ())}
    for before, word in pairwise(["", *words]):
        if before in ("--option", "--split"):  # of a store, which knows its own, and shares of aliases
            continue
        key = re.match(r"([a-z_]+(?:\.[a-z_0-9]+)*)=", word)
        assert not key or re.sub(r"\.\d+", "", key[1]) in known, word


def load_what_is_named(verb: str, given: dict[str, Any], readme: Path) -> bool:
    """Load the config of a command, with its overrides, if it is one that there is: a preset, one of `configs/`, or the
    `my.yaml` of the README."""
    name = "" if verb.startswith("bench") else str(given.get("config") or "")
    files = {"my.yaml": readme, **{f"configs/{f.name}": f for f in CONFIG_FILES}}
    files |= {name: Path(name) for name in presets()}
    if name not in files:
        return False
    overrides = list(given["overrides"] or [])
    if verb == "train" and given["workers"]:
        overrides.append(f"parallel.workers={given['workers'].rpartition(':')[2]}")
    load_config(files[name], overrides)
    return True


def test_commands_in_docs_are_understood(tmp_path: Path) -> None:
    readme, loaded = tmp_path / "my.yaml", 0
    readme.write_text(next(text for place, text in CONFIGS.items() if place.startswith("README.md")), encoding="utf-8")
    commands = [*typed(), *helped()]
    assert len(commands) >= 120
    for place, command in commands:
        words = words_of(command)
        try:
            verb, context = parse(words)
            refuse_unknown_keys(verb, words)
            loaded += load_what_is_named(verb, context.params, readme)
        except Exception as error:
            raise AssertionError(f"{place}: {command}: {error!r}") from error
    assert loaded >= 40


def test_commands_in_running_text_are_understood() -> None:
    for place, command in mentioned():
        if command in NO_COMMAND:
            continue
        try:
            words = words_of(re.sub(r"(?<=--step)( N)?$", " 1", command))
            verb, _ = parse(words)
            refuse_unknown_keys(verb, words)
        except Exception as error:
            if "Missing" in type(error).__name__ or "..." in words:
                continue  # `headway train` as the name of a verb, `headway ...` as any
            raise AssertionError(f"{place}: {command}: {error!r}") from error


def test_keys_in_running_text_are_known() -> None:
    known = set(known_keys())
    for page in PAGES:
        for key in re.findall(r"`((?:[a-z_]+\.)+[a-z_]+)(?:[:=][^`]*)?`", page.read_text(encoding="utf-8")):
            section = key.partition(".")[0]
            if section in Config.model_fields and not key.startswith(NO_KEY) and not key.endswith(".py"):
                assert key in known, f"{page.name}: {key}"


def anchors(page: Path) -> set[str]:
    """What a heading is called in a link, by GitHub's rules."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    found = 0
    for page in PAGES:
        for link in re.findall(r"\]\(([^)]*)\)", page.read_text(encoding="utf-8")):
            if re.match(r"https?://", link):
                continue
            place, _, anchor = link.partition("#")
            target = page.parent / place if place else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link}"
            found += 1
    assert found > 70
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"(docs/{page.name})" in readme for page in (ROOT / "docs").glob("*.md"))


def targets_of(makefile: Path) -> set[str]:
    return set(re.findall(r"^([a-z-]+):", makefile.read_text(encoding="utf-8"), flags=re.MULTILINE))


def test_the_readme_names_both_commands_that_set_everything_up() -> None:
    """And every target that a page names is there."""
    targets = targets_of(ROOT / "Makefile") | targets_of(ROOT / "pipeline.mk")
    first = (ROOT / "README.md").read_text(encoding="utf-8").partition("## ")[0]
    assert {"make quickstart", "make test"} <= set(re.findall(r"^make [a-z-]+", first, flags=re.MULTILINE))
    project = ROOT / "src" / "headway" / "clouds" / "scaffold" / "template" / "project" / "Makefile.jinja"
    for page in PAGES:
        known = targets | (targets_of(project) if page.name == "init.md" else set())
        for target in re.findall(r"(?:^ *|`)make ([a-z-]+)", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            assert target in known, f"{page.name}: make {target}"


ROOMS = [
    ROOT / "docs" / "architecture.md",
    ROOT / "docs" / "what-must-agree.md",
    *sorted((ROOT / "docs" / "rooms").glob("*.md")),
]


def test_the_architecture_fits_on_its_page() -> None:
    assert len(ROOMS[0].read_text(encoding="utf-8").split()) <= 1500


def files_named(page: Path) -> set[str]:
    return set(re.findall(r"(?:[a-z_0-9]+/)*[a-z_0-9]+\.py\b", page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", ROOMS, ids=lambda page: page.stem)
def test_files_that_the_architecture_names_are_there(page: Path) -> None:
    there = {f"/{path.relative_to(ROOT)}" for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.py")}
    named = files_named(page)
    assert len(named) >= 3 or page.stem == "telemetry"
    assert not {name for name in named if not any(path.endswith(f"/{name}") for path in there)}
