"""The identity of a piece of code: the one function that computes it, and how two identities compare.

A function or class of a module is identified by the source of the module that defines it. What a notebook's cell,
`python -` or `python -c` defines has no such source, since `__main__` is then the file of a launcher or none. It is
identified by its compiled code and by everything of its own that it reads: constants, defaults, values of closures,
globals, and functions and classes among them, recursively. Line numbers and names of files do not count, so a cell that
runs again unchanged keeps its identity. Bytecode belongs to a version of Python, which such an identity names.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, Literal

from headway.core.errors import ConfigError
from headway.core.files.hashes import fingerprint, sha256_file

_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_COMPILED = "python-"
_NATIVE_CODE = "built into Python "
#: How identities begin that belong to a version of Python.
_OF_A_VERSION = re.compile(rf"({_COMPILED}|{_NATIVE_CODE})([0-9.]+)")
_MAIN = ("__main__", "__mp_main__")
#: Folders of installed packages.
_PACKAGES = {"site-packages", "dist-packages"}
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented), range)
_NATIVE = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, MethodWrapperType)
#: Attributes of a class that Python sets: the place of the class, or what follows from the others.
_OF_EVERY_CLASS = {
    "__dict__", "__weakref__", "__module__", "__qualname__", "__firstlineno__", "__static_attributes__",
    "__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__", "__doc__", "_abc_impl",
    "__abstractmethods__", "__classdictcell__", "__slotnames__",
}  # fmt: skip


def code_identity(value: Any, module: ModuleType, where: str) -> str:
    """Return the identity of a function, class or other attribute of a module.

    Args:
        value: What the config names, or the caller gave.
        module: The module in which it is found. It may have been defined in another one.
        where: Place in the config, for error messages.

    Returns:
        The SHA-256 of the source of the module that defines it; or `python-X.Y:` and the SHA-256 of its code. Changes
        of modules that this one imports do not show.

    Raises:
        ConfigError: it reads a value that has no identity.
    """
    if isinstance(value, functools.partial):
        return combined([_of_module(value, module, where), code_identity(value.func, module, where)])
    if isinstance(value, FunctionType | type):
        return _of_module(value, sys.modules.get(value.__module__, module), where)
    if isinstance(value, _NATIVE):
        return f"{_NATIVE_CODE}{_PYTHON}" if _source_file(module) is None else _of_module(value, module, where)
    own = sys.modules.get(type(value).__module__)
    parts = [] if own is None or _is_library(own) else [_of_module(type(value), own, where)]
    return combined([_of_module(value, module, where), *parts])


def _of_module(value: Any, module: ModuleType, where: str) -> str:
    """Return the identity of a value by the source of the module that makes it, or by itself if there is none."""
    source = _source_file(module)
    if source is not None and (module.__name__ not in _MAIN or _is_of_file(value, source)):
        return sha256_file(source)
    found = _Walk(where, strict=True)
    found.visit(value)
    return found.identity()


def object_identity(values: Iterable[Any], known: Mapping[int, str] = MappingProxyType({})) -> str:
    """Return the identity of the code of objects that a script made: functions, classes, or instances of classes.

    Code of the user counts wherever it is defined, and of a script not more than what the objects use. Code of the
    standard library and of installed packages counts by its name. An instance that is no plain value counts by its
    class, since what it holds may change as the run proceeds.

    Args:
        values: The objects.
        known: By `id`, names of objects that are identified in another way, such as the model.
    """
    found = _Walk("", strict=False, known=known)
    for value in values:
        found.visit(value)
    return found.identity()


def combined(identities: Iterable[str]) -> str:
    """Return one identity of code that consists of several pieces."""
    parts = sorted(set(identities))
    if len(parts) == 1:
        return parts[0]
    found = fingerprint(parts)
    return f"{_COMPILED}{_PYTHON}:{found}" if any(map(_OF_A_VERSION.match, parts)) else found


def compare(before: str, now: str) -> Literal["same", "changed", "another Python", "another kind"]:
    """Compare two identities of a piece of code.

    Returns:
        "another Python": both belong to versions of Python, which are two, so they cannot be compared.
        "another kind": one was computed from the source of a module, and the other one from compiled code.
    """
    if before == now:
        return "same"
    ours = _OF_A_VERSION.match(now)
    theirs = _OF_A_VERSION.match(before)
    if (ours and ours[1]) != (theirs and theirs[1]):
        return "another kind"
    return "another Python" if ours and theirs and ours[2] != theirs[2] else "changed"


def module_source_hash(module: ModuleType) -> str | None:
    """Return the SHA-256 of a module's source; None if it has none."""
    source = _source_file(module)
    return None if source is None else sha256_file(source)


def is_source(identity: str) -> bool:
    """Return whether an identity was computed from the source of a module, so that no version of Python matters."""
    return _OF_A_VERSION.match(identity) is None


def _source_file(module: ModuleType) -> Path | None:
    """Return the file that holds a module's source, or the library that it was compiled to; None if there is none."""
    file = getattr(module, "__file__", None)
    if file is None:
        return None
    try:
        path = Path(inspect.getsourcefile(module) or file)
    except TypeError:  # a module that looks built in
        path = Path(file)
    return path if path.is_file() else None


def _is_of_file(value: Any, source: Path) -> bool:
    """Return whether a function or class was compiled from a file, as that of a script is; a cell's is not."""
    codes = [value.__code__] if isinstance(value, FunctionType) else []
    if isinstance(value, type):
        codes = [item.__code__ for item in vars(value).values() if isinstance(item, FunctionType)]
    files = [Path(code.co_filename) for code in codes]
    return bool(files) and all(file.is_file() and file.samefile(source) for file in files)


@functools.cache
def _library_folders() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    own = Path(__file__).resolve().parents[1]
    return (own, *(Path(paths[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")))


def _is_library(module: ModuleType | None) -> bool:
    """Return whether a module belongs to Python, to an installed package or to Headway, not to the user."""
    if module is None or module.__name__ in _MAIN:
        return False
    if module.__name__ in sys.builtin_module_names:
        return True
    file = getattr(module, "__file__", None)
    if file is None:
        return getattr(module, "__spec__", None) is not None  # a namespace of packages, or a frozen module
    path = Path(file).resolve()
    if not _PACKAGES.isdisjoint(path.parts):
        return True
    return any(path.is_relative_to(folder) for folder in _library_folders())


class _Walk:
    """Hashes a value and all that it consists of, as a sequence of words each with its length.

    Each function and class has a hash of its own, in which those that it reads stand by their outlines; the identity is
    made of the set of all. So it is the same whether two names lead to one function or to two that are equal, as after
    one of two cells has run again, and calls may go in circles.

    Args:
        where: Place in the config, for error messages.
        strict: Refuse a value without an identity, and count what an object holds; else it counts by its class.
        known: By `id`, names of objects that are identified in another way.
    """

    def __init__(self, where: str, *, strict: bool, known: Mapping[int, str] = MappingProxyType({})) -> None:
        self._where = where
        self._strict = strict
        self._known = known
        self._hash = sha256()
        self._compiled = False
        self._seen: dict[int, int] = {}
        """Numbers of the objects that this hash has, by their `id`."""
        self._kept: list[Any] = []
        """What was visited, so that no later object gets the `id` of one that is gone."""
        self._waiting: deque[tuple[Any, list[str]]] = deque()
        self._awaited: set[int] = set()
        self._reading: list[str] = []
        """Names that lead to the value that is visited."""

    def identity(self) -> str:
        """Return the identity of all that was visited."""
        root = self._hash.hexdigest()
        parts = set[str]()
        while self._waiting:
            value, self._reading = self._waiting.popleft()
            self._hash = sha256()
            self._seen = {}
            self._visit_first(value)
            parts.add(self._hash.hexdigest())
        found = fingerprint([root, *sorted(parts)])
        return f"{_COMPILED}{_PYTHON}:{found}" if self._compiled else found

    def visit(self, value: Any) -> None:
        """Add a value."""
        if id(value) in self._known:
            self._add("known", self._known[id(value)])
        elif type(value) in _PLAIN:
            self._add(type(value).__name__, repr(value))
        elif isinstance(value, ModuleType):
            # By its name and, if it is the user's, by its source: what is taken from it is not known.
            source = None if _is_library(value) or value.__name__ in _MAIN else _source_file(value)
            self._add("module", value.__name__, "" if source is None else sha256_file(source))
        elif type(value) in (tuple, frozenset):  # whether two of them are one object depends on the compiler
            self._visit_first(value)
        elif isinstance(value, FunctionType | type):
            self._add("code", _outline(value))
            if id(value) not in self._awaited:
                self._awaited.add(id(value))
                self._kept.append(value)
                self._waiting.append((value, list(self._reading)))
        elif id(value) in self._seen:
            self._add("again", str(self._seen[id(value)]))
        else:
            self._seen[id(value)] = len(self._seen)
            self._kept.append(value)
            self._visit_first(value)

    def _visit_first(self, value: Any) -> None:
        """Add a value that consists of others."""
        if isinstance(value, CodeType):
            self._code(value)
        elif isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, type):
            self._class(value)
        elif type(value) in (list, tuple):
            self._items(type(value).__name__, value)
        elif type(value) in (set, frozenset):
            self._items(type(value).__name__, sorted(value, key=_without_address))
        elif type(value) in (dict, MappingProxyType):
            self._items("dict", (part for pair in value.items() for part in pair))
        elif isinstance(value, MethodType):
            self._items("method", (value.__func__, value.__self__))
        elif isinstance(value, staticmethod | classmethod):
            self._items(type(value).__name__, (value.__func__,))
        elif isinstance(value, property):
            self._items("property", (value.fget, value.fset, value.fdel))
        elif isinstance(value, functools.partial):
            self._items("partial", (value.func, value.args, value.keywords))
        elif isinstance(value, _NATIVE):
            self._add("native", str(getattr(value, "__module__", None)), value.__qualname__)
            owner = getattr(value, "__self__", None)
            self.visit(None if isinstance(owner, ModuleType) else owner)
        elif (wrapped := getattr(value, "__wrapped__", None)) is not None:  # by functools.cache and other decorators
            self._items(f"wrapper {_name_of(type(value))}", (wrapped,))
        else:
            self._object(value)

    def _add(self, *words: str) -> None:
        for word in words:
            data = word.encode("utf-8", "surrogatepass")
            self._hash.update(len(data).to_bytes(8, "little") + data)

    def _items(self, kind: str, items: Iterable[Any]) -> None:
        found = list(items)
        self._add(kind, str(len(found)))
        for item in found:
            self.visit(item)

    def _named(self, kind: str, name: str, value: Any) -> None:
        self._add(kind, name)
        self._reading.append(name)
        self.visit(value)
        self._reading.pop()

    def _function(self, function: FunctionType) -> None:
        name = _library_name(function)
        if name is not None:
            self._add("library", name)
            # A decorator of the library holds the function of the user.
            self._closure(function, (*_PLAIN, FunctionType, type, MethodType, functools.partial, tuple))
            return
        self._add("function")
        self.visit(function.__code__)
        self._items("defaults", function.__defaults__ or ())
        self._items("keywords", (part for pair in sorted((function.__kwdefaults__ or {}).items()) for part in pair))
        self._closure(function)
        for read in sorted(_globals_read(function.__code__)):
            if read in function.__globals__:
                self._named("global", read, function.__globals__[read])
            else:
                self._add("builtin", read)

    def _closure(self, function: FunctionType, kinds: tuple[type, ...] = (object,)) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:
                self._add("empty", name)
            else:
                self._named("free", name, content if isinstance(content, kinds) else type(content))

    def _class(self, found: type) -> None:
        name = _library_name(found)
        if name is not None:
            self._add("library", name)
            return
        self._items("class", found.__bases__)
        for key, value in sorted(vars(found).items()):
            if key not in _OF_EVERY_CLASS and not inspect.isgetsetdescriptor(value):
                self._named("attribute", key, value)

    def _code(self, code: CodeType) -> None:
        self._compiled = True
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        self._add("code", *map(str, counts), code.co_code.hex(), code.co_exceptiontable.hex())
        for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars):
            self._add(str(len(names)), *names)
        self._items("constants", code.co_consts)

    def _object(self, value: Any) -> None:
        """Add an instance of a class: by what it is made of, as `copy` sees it, or by its class alone."""
        self._named("instance of", type(value).__name__, type(value))
        if not self._strict:
            return
        torch = sys.modules.get("torch")
        try:
            if torch is not None and isinstance(value, torch.Tensor):
                data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
                self._add(str(value.dtype), str(tuple(value.shape)), sha256(data).hexdigest())
                return
            made_of = value.__reduce_ex__(4)
        except Exception:
            raise self._unknown(value) from None
        if isinstance(made_of, str):
            self._add("name", made_of)
            return
        make, arguments, *rest = made_of
        state, items, pairs = (*rest, None, None, None)[:3]
        self._items("made", (make, arguments, state, list(items or ()), list(pairs or ())))

    def _unknown(self, value: Any) -> ConfigError:
        name = ".".join(self._reading)
        return ConfigError(
            f"the function reads '{name}', {type(value).__name__}, which has no identity, so a resumed run could not"
            " tell whether it has changed",
            where=self._where,
            fix="define the function and what it reads in a module of its own, and give that one (package.module:name);"
            f" or make '{name}' within the function",
        )


def _without_address(value: Any) -> str:
    """Return a value as text by which a set is ordered alike in every process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _outline(value: FunctionType | type) -> str:
    """Return the hash of the code of a function, or of a class's own functions with their names, and of no other; the
    name of one that belongs to a library."""
    name = _library_name(value)
    if name is not None:
        return name
    own = _Walk("", strict=False)
    functions = [value] if isinstance(value, FunctionType) else []
    if isinstance(value, type):
        functions = [item for _, item in sorted(vars(value).items()) if isinstance(item, FunctionType)]
    for function in functions:
        own.visit(function.__name__ if isinstance(value, type) else "")
        own.visit(function.__code__)
    return own.identity()


def _library_name(value: FunctionType | type) -> str | None:
    """Return the name of code that belongs to a library, which stands for it whatever its version; None for others."""
    if isinstance(value, type):
        return _name_of(value) if _is_library(sys.modules.get(value.__module__)) else None
    module = str(value.__globals__.get("__name__"))  # of the code itself: a decorator gives its own another one
    return f"{module}.{value.__code__.co_qualname}" if _is_library(sys.modules.get(module)) else None


def _name_of(found: type) -> str:
    return f"{found.__module__}.{found.__qualname__}"


def _globals_read(code: CodeType) -> set[str]:
    """Return the names of the globals that a function reads, without those that it sets: they are no constants."""
    read = set[str]()
    written = set[str]()
    for one in _codes(code):
        for instruction in dis.get_instructions(one):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
                read.add(instruction.argval)
            elif instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                written.add(instruction.argval)
    return read - written


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
