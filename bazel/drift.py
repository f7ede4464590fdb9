"""Holds the BUILD files against the tree: exit code 1, with a line for each place where they differ.

    python bazel/drift.py

BUILD files are read as Python, which their syntax is a part of; no Bazel is needed. A Python file that no target has is
reported, and so are names that lead to no file or target, imports that no dependency brings, and packages that the lock
does not have.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

#: Folders whose Python files all belong to targets.
FOLDERS = ("bazel", "src", "tests")
#: Distributions whose modules have another name.
DISTRIBUTIONS = {"yaml": "pyyaml"}
#: What `pytest_files` adds to the dependencies it is given.
ADDED = {"pytest_files": ["@pypi//pytest"]}
#: Folders on the path of imports, of which each entry is a module.
ROOTS = ("src", "tests", "bazel")
LOCK = "bazel/requirements.txt"
LABEL = re.compile(r"(?P<repository>@\w+)?(?://(?P<package>[^:]*))?(?::(?P<name>.+))?")


@dataclass
class Target:
    """A call in a BUILD file: its rule, the folder of the file from the root, and its lists by attribute."""

    rule: str
    name: str
    folder: str
    lists: dict[str, list[str]] = field(default_factory=dict)


def packages(root: Path) -> dict[str, list[Target]]:
    """Return the targets of each folder with a BUILD file, by its name from the root; that of the root is empty."""
    files = [file for top in ("", *FOLDERS, "vendor") for file in _build_files(root, top)]
    folders = {_name(file.parent, root) for file in files}
    return {_name(file.parent, root): list(_targets(file, root, folders)) for file in files}


def drift(root: Path) -> Iterator[str]:
    """Yield a line for each difference between the BUILD files and the tree."""
    known = packages(root)
    targets = [target for found in known.values() for target in found]
    covered = {_label(target.folder, name) for target in targets for name in target.lists.get("srcs", [])}
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*.py")):
            name = _name(file, root)
            if name not in covered and not _is_hidden(file, root) and "{" not in name:
                yield f"{name}: no target has it"
    locked = _locked(root)
    names = {f"{folder}/{one.name}".lstrip("/") for folder, found in known.items() for one in found}
    for target in targets:
        for name in (name for labels in target.lists.values() for name in labels):
            yield from _unresolved(root, known, target, name, (names, locked))
        if target.rule.startswith("py"):
            yield from _unnamed_imports(root, known, target)


def _build_files(root: Path, top: str) -> list[Path]:
    if not top:
        return [root / "BUILD.bazel"]
    found = (root / top).rglob("BUILD.bazel")
    return sorted(file for file in found if "{" not in _name(file, root) and "template" not in file.parts)


def _targets(file: Path, root: Path, packages: set[str]) -> Iterator[Target]:
    folder = _name(file.parent, root)
    for statement in ast.parse(file.read_text(encoding="utf-8"), str(file)).body:
        call = getattr(statement, "value", None)
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id == "load":
            continue
        below = _Folder(file.parent, {root / name for name in packages} - {file.parent})
        lists = {str(word.arg): below.strings(word.value) for word in call.keywords if word.arg in _LISTS}
        if call.func.id == "exports_files":
            lists = {"srcs": below.strings(call.args[0])}
        named = next((word.value for word in call.keywords if word.arg == "name"), None)
        lists["deps"] = lists.get("deps", []) + ADDED.get(call.func.id, [])
        yield Target(call.func.id, ast.literal_eval(named) if named else "", folder, lists)


_LISTS = ("srcs", "deps", "data", "tars")


@dataclass
class _Folder:
    """A package: its folder, and the packages below it, whose files are not its own."""

    path: Path
    others: set[Path]

    def strings(self, node: ast.expr) -> list[str]:
        """Evaluate a list: literals, sums and `glob`."""
        if isinstance(node, ast.BinOp):
            return [*self.strings(node.left), *self.strings(node.right)]
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "glob":
            excluded = [one for word in node.keywords if word.arg == "exclude" for one in ast.literal_eval(word.value)]
            return self.glob(ast.literal_eval(node.args[0]), excluded)
        return list(ast.literal_eval(node))

    def glob(self, patterns: Sequence[str], excluded: Sequence[str]) -> list[str]:
        """Return the files that patterns name, as Bazel does: none of another package."""
        kept = _matcher(patterns)
        left = _matcher(excluded)
        names = (_name(file, self.path) for file in self.files(self.path))
        return sorted(name for name in names if kept.fullmatch(name) and not left.fullmatch(name))

    def files(self, folder: Path) -> Iterator[Path]:
        """Yield the files below a folder."""
        for path in folder.iterdir():
            if path.is_dir():
                if path not in self.others and path.name not in ("__pycache__", ".git"):
                    yield from self.files(path)
            else:
                yield path


def _matcher(patterns: Sequence[str]) -> re.Pattern[str]:
    """Return what matches names as patterns do: `**` stands for any folders, `*` for a part of one name."""
    return re.compile("|".join(map(_expression, patterns)) or r"(?!)")


def _expression(pattern: str) -> str:
    *folders, last = pattern.split("/")
    before = ["(?:[^/]+/)*" if one == "**" else f"{_part(one)}/" for one in folders]
    return "".join(before) + (".*" if last == "**" else _part(last))


def _part(text: str) -> str:
    return "[^/]*".join(map(re.escape, text.split("*")))


def _label(folder: str, name: str) -> str:
    """Return a label of this repository as a path from its root."""
    found = LABEL.fullmatch(name)
    if found is None or (found["package"] is None and not name.startswith(":")):
        return f"{folder}/{name}".lstrip("/")
    package = folder if found["package"] is None else found["package"]
    return f"{package}/{found['name'] or package.rpartition('/')[2]}".lstrip("/")


def _unresolved(
    root: Path, known: Mapping[str, list[Target]], target: Target, name: str, there: tuple[set[str], set[str] | None]
) -> Iterator[str]:
    names, locked = there
    place = f"//{target.folder}:{target.name}"
    if name.startswith("@pypi//"):
        if locked is not None and name.removeprefix("@pypi//") not in locked:
            yield f"{place}: {name} is not in {LOCK}"
    elif not name.startswith("@"):
        path = _label(target.folder, name)
        if path == LOCK and locked is None:
            return  # `make lock` writes it, where there is an index of packages
        if path not in names and not (root / path).is_file():
            yield f"{place}: {name} is neither a file nor a target"
        elif path not in names and not name.startswith("//") and _package_of(known, path) != target.folder:
            yield f"{place}: {name} is in the package //{_package_of(known, path)}"


def _package_of(known: Mapping[str, list[Target]], path: str) -> str:
    return max((folder for folder in known if not folder or path.startswith(f"{folder}/")), key=len)


def _unnamed_imports(root: Path, known: Mapping[str, list[Target]], target: Target) -> Iterator[str]:
    """Yield imports at the top of files that no dependency brings. Those in functions are of optional packages."""
    deps = set(target.lists.get("deps", []))
    optional = _optional(root)
    for name in sorted({found for file in target.lists.get("srcs", []) for found in _imports(root, target, file)}):
        own = next((f"//{top}/{name}" for top in ROOTS if f"{top}/{name}" in known), None)
        here = any((root / target.folder / f"{name}{end}").exists() for end in ("", ".py"))
        if name in sys.stdlib_module_names | optional or (own or "") == f"//{target.folder}" or (own is None and here):
            continue
        wanted = {own} if own else {f"@{name}", f"@pypi//{DISTRIBUTIONS.get(name, name)}"}
        reached = deps | {dep for one in deps for dep in _deps_of(known, target.folder, one)}
        if not wanted & reached:
            yield f"//{target.folder}:{target.name}: imports {name}, but no dependency brings it"


def _deps_of(known: Mapping[str, list[Target]], folder: str, label: str) -> list[str]:
    path = _label(folder, label)
    for package, targets in known.items():
        for target in targets:
            if f"{package}/{target.name}".lstrip("/") == path:
                return target.lists.get("deps", [])
    return []


def _imports(root: Path, target: Target, file: str) -> Iterator[str]:
    path = root / target.folder / file
    if not path.is_file() or path.suffix != ".py":
        return
    for node in ast.parse(path.read_text(encoding="utf-8"), str(path)).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


@cache
def _optional(root: Path) -> frozenset[str]:
    """Return the packages of the project's extras: files that import them at their top are imported where they are."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project.get("optional-dependencies", {}).values()
    return frozenset(re.split(r"[^\w.-]", one)[0].lower().replace("-", "_") for names in extras for one in names)


def _locked(root: Path) -> set[str] | None:
    """Return the packages of the lock as labels have them; None if it was not made yet."""
    file = root / LOCK
    if not file.is_file():
        return None
    names = re.findall(r"^([A-Za-z0-9][\w.-]*)\s*==", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[-.]", "_", name.lower()) for name in names}


def _name(path: Path, root: Path) -> str:
    name = path.relative_to(root).as_posix()
    return "" if name == "." else name


def _is_hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


if __name__ == "__main__":
    differences = list(drift(Path(__file__).parents[1]))
    for line in differences:
        print(line)
    sys.exit(bool(differences))
