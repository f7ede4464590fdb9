"""No module of `src` or `benchmarks` imports itself around a circle at run time, and a planted circle is found."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grimp
import pytest

import headway

ROOT = Path(__file__).parents[2]
if not (ROOT / "tools").exists() or not (ROOT / "benchmarks").exists():
    pytest.skip("tools and benchmarks are not part of this copy", allow_module_level=True)


@pytest.fixture(scope="module")
def figures() -> Any:
    """The script `tools/code_figures.py`."""
    spec = importlib.util.spec_from_file_location("code_figures", ROOT / "tools" / "code_figures.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def graph_of(package: str) -> dict[str, set[str]]:
    """What import-linter sees: imports inside functions too, none under `if TYPE_CHECKING`."""
    graph = grimp.build_graph(package, exclude_type_checking_imports=True, cache_dir=None)
    return {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}


def test_src_has_no_circle(figures: Any) -> None:
    graph = graph_of("headway")
    graph["headway"] |= set(headway._HOMES.values())  # imported by name when they are first used
    assert len(graph) > 400
    assert figures.circles(graph) == []


def test_types_have_no_circle(figures: Any) -> None:
    """A circle of types is two files that a reader understands only together."""
    assert figures.circles(figures.import_graph(ROOT / "src", with_types=True)) == []


def test_benchmarks_have_no_circle(figures: Any) -> None:
    graph = figures.import_graph(ROOT / "benchmarks")
    assert "train.contender" in graph["train.speed"] and "train.speed" in graph["startup.first_step"]
    assert figures.circles(graph) == []


def test_the_script_sees_the_imports_that_the_linter_sees(figures: Any) -> None:
    assert figures.import_graph(ROOT / "src") == graph_of("headway")


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package whose modules import each other around, one of them inside a function."""
    package = tmp_path / "planted"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "first.py").write_text("from planted.second import do\n")
    (package / "second.py").write_text("from planted import third\n\n\ndef do():\n    third.go()\n")
    (package / "third.py").write_text("def go():\n    import planted.first\n")
    (package / "typed.py").write_text(
        "from typing import TYPE_CHECKING\n\nfrom planted import first\n\nif TYPE_CHECKING:\n    import planted.user\n"
    )
    (package / "user.py").write_text("import planted.typed\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("planted", None)


def test_a_planted_circle_is_found(figures: Any, planted: Path) -> None:
    circle = [["planted.first", "planted.second", "planted.third"]]
    assert figures.circles(figures.import_graph(planted)) == circle
    assert figures.circles(graph_of("planted")) == circle


def test_a_circle_of_scripts_is_found_across_folders(figures: Any, tmp_path: Path) -> None:
    (tmp_path / "peers").mkdir()
    (tmp_path / "speed.py").write_text("import statistics\n\nfrom contender import run\n")
    (tmp_path / "contender.py").write_text("def run():\n    from work import Job\n")
    (tmp_path / "peers" / "work.py").write_text("from speed import main\n")
    assert figures.circles(figures.import_graph(tmp_path)) == [["contender", "peers.work", "speed"]]
