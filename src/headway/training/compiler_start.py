"""The start of PyTorch's compiler for a CPU, without what every process would do again or for nothing.

All of it is left alone where the PyTorch at hand does not have the part in question.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from headway.core.files import fingerprint

_GRAPHS = "networkx"


@cache
def start_compiler(device_type: str) -> None:
    """Load what compiles, and meanwhile begin what the first code waits for; nothing where that is not for a CPU."""
    if device_type != "cpu":
        return
    import torch.utils.cpp_extension  # nothing is to be loaded by two threads at once
    from torch._inductor import cpu_vec_isa
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    _remember_tries()
    beside = ThreadPoolExecutor(1, thread_name_prefix="compiler-ahead")
    # Whoever asks waits for the answer: tries change the flags they are made with, so only one may be under way.
    found = beside.submit(cpu_vec_isa.valid_vec_isa_list)
    cpu_vec_isa.valid_vec_isa_list = found.result  # type: ignore[assignment]
    # Code of nothing, which is compiled when it is called, and never is. Whoever needs it meets the same errors.
    beside.submit(CppPythonBindingsCodeCache.load_pybinding_async, [], "")
    beside.shutdown(wait=False)
    with _without_templates(), _without_graphs():
        import torch._inductor.compile_fx  # noqa: F401


def _remember_tries() -> None:
    """Keep beside each library with which PyTorch tries vector instructions that it has loaded.

    Every process would load the same six again, each in a process of its own. PyTorch asks the processor and names the
    library by its code and compiler itself; what is left to compare are the libraries that it is loaded with.
    """
    from torch._inductor.cpu_vec_isa import VecISA

    if hasattr(VecISA, "_probe_load"):  # from 2.13 on
        tries = VecISA._probe_load

        def loads(isa: VecISA, library: str) -> bool:
            note, needed = Path(f"{library}.loaded"), _loaded_with(Path(library))
            with suppress(OSError):
                if note.read_text() == needed:
                    return True
            loaded = tries(isa, library)
            if loaded:
                with suppress(OSError):  # a cache that can only be read
                    note.write_text(needed)
            return loaded

        VecISA._probe_load = loads  # type: ignore[assignment, method-assign]


def _loaded_with(library: Path) -> str:
    """The library itself, PyTorch's and the C library, as far as they can be told apart at a glance."""
    pytorch = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    files = [file.stat() for file in (library, pytorch) if file.exists()]
    return fingerprint(
        {
            "pytorch": str(pytorch),
            "files": [(file.st_size, file.st_mtime_ns) for file in files],
            "libc": os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else None,
        }
    )


@contextmanager
def _without_templates() -> Iterator[None]:
    """Let the templates of kernels for Triton, which come with the compiler, be translated by whoever uses one."""
    from torch._inductor.codegen import common

    if not hasattr(common.KernelTemplate, "_template_from_string"):
        yield
        return
    translate = common.KernelTemplate._template_from_string
    common.KernelTemplate._template_from_string = staticmethod(_Template)  # type: ignore[method-assign]
    try:
        yield
    finally:
        common.KernelTemplate._template_from_string = staticmethod(translate)  # type: ignore[method-assign]


class _Template:
    """One that is translated when it is first used."""

    def __init__(self, source: str) -> None:
        self.source = source

    @cached_property
    def render(self) -> Any:
        """Of the translated template."""
        from torch._inductor.codegen.common import KernelTemplate

        return KernelTemplate._template_from_string(self.source).render


@contextmanager
def _without_graphs() -> Iterator[None]:
    """Let NetworkX, which comes with the compiler for what is not in its cache, be loaded by whoever uses it: 13 MB."""
    if _GRAPHS in sys.modules:
        yield
        return
    sys.modules[_GRAPHS] = later = _Later(_GRAPHS)
    later.DiGraph = Any  # type: ignore[attr-defined]  # annotations name it, and are looked at while it is not there
    try:
        yield
    finally:
        del later.DiGraph
        if sys.modules.get(_GRAPHS) is later:
            del sys.modules[_GRAPHS]


class _Later(ModuleType):
    """In the place of a module that is loaded when something of it is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # of those who look through all modules there are
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)
