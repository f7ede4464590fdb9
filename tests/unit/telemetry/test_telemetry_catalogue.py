"""The catalogue holds every name that the source records, and nothing that it does not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import headway
from headway.telemetry.catalogue import CATALOGUE, Kind, Unit, metric, reference

ROOT = Path(__file__).parents[3]
SOURCES = Path(headway.__file__).parent
NAME = re.compile(r"[a-z_]+(/[a-z_]+)+/?")
#: Constants that look like metrics.
OTHER = {"n/a", "application/json"}
#: Files that only read metrics, or declare them.
READERS = ("telemetry/catalogue.py", "tracking/", "cli/")
#: ... but for this one, which derives those of the group `run/`.
DERIVES = SOURCES / "tracking" / "live_run.py"


def written(tree: ast.AST) -> Iterator[str]:
    """Names that code gives to values: keys of dicts, items that are assigned, first parts of pairs that are yielded,
    and constants named for such a use.

    Of an f-string, each part that is computed is `*`.
    """
    for node in ast.walk(tree):
        keys: list[ast.expr | None] = []
        if isinstance(node, ast.Dict):
            keys = list(node.keys)
        elif isinstance(node, ast.DictComp):
            keys = [node.key]
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            keys = [node.slice]
        elif isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple):
            keys = [node.value.elts[0]]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            keys = [node.value]  # a constant, which the code uses as a key
        for key in keys:
            name = _text(key)
            if name is not None and NAME.fullmatch(name.replace("*", "x")) and name not in OTHER:
                yield name


def _text(node: ast.expr | None) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
    return None


def known(name: str) -> list[str]:
    """The entries that a name, with `*` for what is computed, may be of."""
    if metric(name) is not None:
        found = metric(name)
        return [found.name] if found else []
    pattern = re.compile(re.escape(name).replace(r"\*", "[^/]+"))
    return [entry for entry in CATALOGUE if pattern.fullmatch(entry)]


def found_in_source() -> dict[str, str]:
    files = [path for path in SOURCES.rglob("*.py") if not str(path.relative_to(SOURCES)).startswith(READERS)]
    found = {
        name: str(path.relative_to(SOURCES))
        for path in files
        if "/" in (text := path.read_text(encoding="utf-8"))
        for name in written(ast.parse(text))
    }
    tree = ast.parse(DERIVES.read_text(encoding="utf-8"))
    derived = [name for node in ast.walk(tree) if isinstance(node, ast.expr) and (name := _text(node)) is not None]
    return found | {name: "tracking/live_run.py" for name in derived if re.fullmatch(r"run/.*[^/]", name)}


@pytest.fixture(scope="module")
def source() -> dict[str, str]:
    return found_in_source()


def test_every_name_in_the_source_is_in_the_catalogue(source: dict[str, str]) -> None:
    assert len(source) > 30
    assert {name: file for name, file in source.items() if not known(name)} == {}


def test_the_catalogue_holds_nothing_that_is_not_recorded(source: dict[str, str]) -> None:
    there = {entry for name in source for entry in known(name)} | {"step", "attempt", "time"}
    assert sorted(set(CATALOGUE) - there) == []


@pytest.mark.parametrize(
    "code",
    [
        'metrics = {"train/loss": 1.0, "train/other": 2.0}',
        'metrics["train/other"] = 2.0',
        'OTHER = "train/other"',
        'yield "train/other", 2.0',
        'metrics = {f"train/{name}/other": 1.0 for name in names}',
        'log.write(step, {**more, f"train/other_{name}": 1.0})',
    ],
)
def test_a_name_that_is_missing_is_found(code: str) -> None:
    assert [name for name in written(ast.parse(code)) if not known(name)]


def test_a_family_has_a_metric_for_each_value_of_its_label() -> None:
    family = metric("data/share/tales of/old")
    assert family is CATALOGUE["data/share/<source>"]
    assert (family.label, family.label_value("data/share/tales of/old")) == ("source", "tales of/old")
    assert metric("data/share/") is None
    assert metric("mine/loss") is None


def test_prometheus_names_have_base_units() -> None:
    names = {entry.name: entry.prometheus_name for entry in CATALOGUE.values()}
    assert names["train/loss"] == "headway_train_loss"
    assert names["train/items"] == "headway_train_items_total"
    assert names["memory/peak_gib"] == "headway_memory_peak_bytes"
    assert names["speed/data_wait_share"] == "headway_speed_data_wait_ratio"
    assert names["goodput/ratio"] == "headway_goodput_ratio"
    assert names["goodput/lost_seconds/<cause>"] == "headway_goodput_lost_seconds"
    assert names["checkpoint/stall_seconds"] == "headway_checkpoint_stall_seconds_total"
    assert names["cost/spent_usd"] == "headway_cost_spent_usd"
    assert len(set(names.values())) == len(names)
    # https://prometheus.io/docs/concepts/data_model/ and the endings that /docs/practices/naming keeps for other kinds.
    assert all(re.fullmatch(r"headway_[a-z0-9_]+", name) for name in names.values())
    for entry in CATALOGUE.values():
        assert entry.prometheus_name.endswith("_total") == (entry.kind is not Kind.GAUGE)
        assert not re.search(r"_(gib|mhz|share|count|sum|bucket)$", entry.prometheus_name)


def test_the_unit_of_a_name_is_its_unit() -> None:
    endings = {
        "_timestamp_seconds": Unit.TIMESTAMP,
        "_seconds": Unit.SECONDS,
        "_gib": Unit.GIB,
        "_usd": Unit.USD,
        "_share": Unit.RATIO,
    }
    for entry in CATALOGUE.values():
        ending = next((ending for ending in endings if entry.prefix.rstrip("/").endswith(ending)), None)
        assert ending is None or entry.unit is endings[ending], entry.name


def test_help_is_one_sentence_without_a_full_stop() -> None:
    for entry in CATALOGUE.values():
        assert re.fullmatch(r"[A-Z][^|\n]*[^.\s|]", entry.help), entry.name


def test_the_page_of_metrics_is_current() -> None:
    committed = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert committed == reference(), "run: headway runs metrics --markdown > docs/metrics.md"
