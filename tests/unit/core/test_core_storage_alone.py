"""Only `core/storage` reaches a store: no other file imports a storage library, reads its errors or retries."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import headway
from headway.checkpoint.remote import objects
from headway.core import errors
from headway.data import storage as remote
from headway.data.remote_cache import WrongContentError

SOURCE = Path(headway.__file__).parent
LIBRARIES = {"fsspec", "s3fs", "gcsfs", "adlfs"}
#: What gives raw access to a store, or to the meaning of its errors.
RAW = {"filesystem", "kind_of"}
#: Bucket rules, which are no objects; errors of `datasets`, which has a client of its own; what a glob names.
MAY = {
    "lab/doctor/lifecycle.py": {"filesystem", "kind_of"},
    "text/reading/huggingface_datasets.py": {"kind_of"},
    "clouds/launchers/policy.py": {"headway.core.storage.listing"},
}
#: What a failed request to a store becomes, and the bases of that.
FAILURES = {
    kind.__name__
    for kind in (
        *(objects.NoAnswer, objects.UnreachableError, objects.GivenUp),
        *(remote.MissingError, remote.UnreachableError, WrongContentError),
        *(errors.CheckpointError, errors.DataError, errors.HeadwayError),
    )
}
WAITS = {"sleep", "wait"}


def name_of(node: ast.expr | None) -> str:
    """The last part of a name: `sleep` of `time.sleep`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def libraries_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [str(node.module)]
        elif isinstance(node, ast.Call) and name_of(node.func) in ("import_module", "__import__"):
            names = [str(one.value) for one in node.args if isinstance(one, ast.Constant)]
        yield from (name for name in names if name.split(".")[0] in LIBRARIES)


def raw_in(tree: ast.AST) -> set[str]:
    """The names of raw access that a file imports; its modules give it as well."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("headway.core.storage"):
            found |= {alias.name for alias in node.names} & RAW
            found |= {f"{node.module}" for _ in node.names if node.module != "headway.core.storage"}
        elif isinstance(node, ast.ImportFrom) and node.module == "headway.core":
            found |= {alias.name for alias in node.names} & {"storage"}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("headway.core.storage")}
    return found


def caught(handler: ast.ExceptHandler) -> set[str]:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {name_of(kind) for kind in kinds}


def retries_in(tree: ast.AST) -> list[int]:
    """The lines of loops that catch a store's failure and wait."""
    found = []
    for loop in ast.walk(tree):
        if isinstance(loop, ast.While | ast.For):
            inside = list(ast.walk(loop))
            catches = any(isinstance(node, ast.ExceptHandler) and caught(node) & FAILURES for node in inside)
            waits = any(isinstance(node, ast.Call) and name_of(node.func) in WAITS for node in inside)
            found += [loop.lineno] if catches and waits else []
    return found


@pytest.fixture(scope="module")
def others() -> dict[str, ast.AST]:
    """Every file outside `core/storage`."""
    found = {path.relative_to(SOURCE).as_posix(): path for path in SOURCE.rglob("*.py")}
    inside = {name for name in found if name.startswith("core/storage/")}
    assert "core/storage/client.py" in inside and len(found) - len(inside) > 400
    return {name: ast.parse(found[name].read_text(encoding="utf-8")) for name in found if name not in inside}


def test_no_other_file_imports_a_storage_library(others: dict[str, ast.AST]) -> None:
    assert {name: found for name, tree in others.items() if (found := list(libraries_in(tree)))} == {}


def test_no_other_file_reads_the_errors_of_a_store(others: dict[str, ast.AST]) -> None:
    assert {name: found for name, tree in others.items() if (found := raw_in(tree))} == MAY


def test_no_other_file_retries_requests(others: dict[str, ast.AST]) -> None:
    assert {name for name, tree in others.items() if retries_in(tree)} == set()


def test_the_client_is_what_the_checks_find() -> None:
    """They see the libraries inside, where they are imported in functions."""
    inside = [ast.parse(path.read_text(encoding="utf-8")) for path in (SOURCE / "core" / "storage").glob("*.py")]
    assert {name for tree in inside for name in libraries_in(tree)} == {"fsspec", "fsspec.asyn"}


@pytest.mark.parametrize(
    "planted",
    [
        "def go():\n    import fsspec.core",
        "from s3fs import S3FileSystem",
        "import importlib\nimportlib.import_module('gcsfs')",
    ],
)
def test_a_planted_import_is_found(planted: str) -> None:
    assert list(libraries_in(ast.parse(planted)))


@pytest.mark.parametrize(
    "planted",
    [
        "from headway.core.storage import kind_of as meaning",
        "from headway.core.storage.filesystem import scheme_of",
        "from headway.core import storage",
        "import headway.core.storage.client",
    ],
)
def test_a_planted_way_around_the_client_is_found(planted: str) -> None:
    assert raw_in(ast.parse(planted))
    assert not raw_in(ast.parse("from headway.core.storage import Storage, scheme_of"))


def test_a_planted_retry_is_found() -> None:
    loop = """
while True:
    try:
        ask()
    except {} as error:
        if late():
            raise
    {}
"""
    assert retries_in(ast.parse(loop.format("remote.UnreachableError", "time.sleep(wait)"))) == [2]
    assert retries_in(ast.parse(loop.format("(KeyError, NoAnswer)", "stopping.wait(1)"))) == [2]
    assert retries_in(ast.parse(loop.format("UnreachableError", "note()"))) == []
    assert retries_in(ast.parse(loop.format("KeyError", "sleep(1)"))) == []
