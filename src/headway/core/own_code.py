"""The sources of the user's own code: a module and the modules beside it that it imports, found without running them.

One list says what belongs to the identity of a run, and what travels with a launch.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import resolve_name, spec_from_loader
from pathlib import Path
from types import CodeType, ModuleType

from headway.core.errors import ConfigError
from headway.core.files.hashes import fingerprint

#: Folders of installed packages: another machine installs those.
_PACKAGES = {"site-packages", "dist-packages"}


def sources_of(name: str, where: str) -> dict[str, str]:
    """Return the sources of a module, and of the modules beside it that it imports, by path below their folder.

    Imports are read from the sources, those within functions too. Of an installed package only the package itself
    counts.

    Args:
        name: The module, `package.module`.
        where: Place in the config, for error messages.

    Raises:
        ConfigError: there is no such source.
    """
    top = name.partition(".")[0]
    root = next((folder for folder in _folders() if _file_of(top, folder) or (folder / top).is_dir()), None)
    if name == "__main__" or root is None or _file_of(name, root) is None:
        raise ConfigError(
            f"the module {name} has no source that a worker could find again",
            where=where,
            fix="put the function into a module of its own, importable from the working directory (package.module)",
        )
    found: dict[str, str] = {}
    waiting = [name]
    while waiting:
        for module in _with_parents(waiting.pop()):
            file = _file_of(module, root)
            path = "" if file is None else file.relative_to(root).as_posix()
            if file is None or path in found or (is_installed(root) and module.partition(".")[0] != top):
                continue
            found[path] = file.read_text(encoding="utf-8")
            package = module if file.name == "__init__.py" else module.rpartition(".")[0]
            waiting += _imports(found[path], path, package)
    return dict(sorted(found.items()))


def identity_of_sources(sources: Mapping[str, str]) -> str:
    """Return the identity of code that consists of these sources: the SHA-256 of their paths and their hashes."""
    return fingerprint({path: sha256(text.encode()).hexdigest() for path, text in sources.items()})


def carried_sources(name: str, where: str) -> dict[str, str]:
    """Return the sources that other machines need to import a module: none of an installed package, else `sources_of`.

    Raises:
        ConfigError: as `sources_of`.
    """
    found = sources_of(name, where)
    root = next(folder for folder in _folders() if (folder / next(iter(found))).is_file())
    return {} if is_installed(root) else found


def is_installed(folder: Path) -> bool:
    """Return whether a folder holds installed packages."""
    return not _PACKAGES.isdisjoint(folder.resolve().parts)


def import_from(sources: Mapping[str, str]) -> None:
    """Let this process import modules from sources that have travelled, before any of the same name on its disk."""
    if not any(isinstance(finder, _Carried) and finder.sources == sources for finder in sys.meta_path):
        sys.meta_path.insert(0, _Carried(sources))


class _Carried(MetaPathFinder, InspectLoader):
    """Imports modules from texts in memory."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.sources = dict(sources)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self._file(fullname)
        if file is not None:
            return spec_from_loader(fullname, self, origin=file, is_package=file.endswith("/__init__.py"))
        folder = fullname.replace(".", "/") + "/"
        if not any(known.startswith(folder) for known in self.sources):
            return None
        spec = ModuleSpec(fullname, None, is_package=True)  # a namespace
        spec.submodule_search_locations = []
        return spec

    def get_source(self, fullname: str) -> str:
        return self.sources[self._file(fullname) or ""]

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_source(fullname), self._file(fullname) or "")

    def is_package(self, fullname: str) -> bool:
        return (self._file(fullname) or "").endswith("/__init__.py")

    def _file(self, fullname: str) -> str | None:
        stem = fullname.replace(".", "/")
        return next((file for file in (f"{stem}/__init__.py", f"{stem}.py") if file in self.sources), None)


def _folders() -> Iterator[Path]:
    yield from (Path(folder or ".").absolute() for folder in (*sys.path, "."))


def _file_of(module: str, root: Path) -> Path | None:
    """Return the source of a module below a folder; None for a namespace, and for what is not there."""
    stem = root.joinpath(*module.split("."))
    return next((file for file in (stem / "__init__.py", stem.with_name(f"{stem.name}.py")) if file.is_file()), None)


def _with_parents(module: str) -> Iterator[str]:
    parts = module.split(".")
    yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _imports(text: str, path: str, package: str) -> Iterator[str]:
    """Yield the names of modules that a source may import; some are names of functions in them."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(
            f"the module cannot be imported: {error.msg}", where=f"{path}:{error.lineno}", fix="correct it"
        ) from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            try:
                base = resolve_name("." * node.level + module, package) if node.level else module
            except ImportError:  # beyond the top: Python says so when it imports it
                continue
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
