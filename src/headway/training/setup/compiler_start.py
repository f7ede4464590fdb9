"""A faster start of PyTorch's compiler on a CPU: it avoids work that every process would repeat or never use.

Each part is skipped where the installed PyTorch lacks the internals that it needs.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from headway.core.files.hashes import fingerprint


@cache
def start_compiler(device_type: str) -> None:
    """Load the compiler, and prepare in the background what the first compilation waits for; only for a CPU."""
    if device_type != "cpu":
        return
    import torch.utils.cpp_extension  # before threads start, so that no two of them import it at once
    from torch._inductor import cpu_vec_isa
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    _cache_instruction_checks()
    background = ThreadPoolExecutor(1, thread_name_prefix="compiler-ahead")
    # Callers wait for this result. The checks change the compiler flags that they use, so only one may run at a time.
    found = background.submit(cpu_vec_isa.valid_vec_isa_list)
    cpu_vec_isa.valid_vec_isa_list = found.result  # type: ignore[assignment]
    # Load an empty binding in advance. It compiles its code only when called, which never happens; a real caller meets
    # any errors again.
    background.submit(CppPythonBindingsCodeCache.load_pybinding_async, [], "")
    background.shutdown(wait=False)
    import torch._inductor.compile_fx  # noqa: F401


def _cache_instruction_checks() -> None:
    """Cache which of the libraries with which PyTorch probes vector instructions could be loaded.

    Every process would load the same six again, each in a subprocess. PyTorch names a library by its code and compiler,
    and asks the processor itself. So the cache only compares the libraries that it is loaded with.
    """
    from torch._inductor.cpu_vec_isa import VecISA

    if hasattr(VecISA, "_probe_load"):  # from 2.13 on
        probe = VecISA._probe_load

        def loads(isa: VecISA, library: str) -> bool:
            note = Path(f"{library}.loaded")
            # A fingerprint of the library, of PyTorch's and of the C library, by what is cheap to read.
            pytorch = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
            files = [file.stat() for file in (Path(library), pytorch) if file.exists()]
            needed = fingerprint(
                {
                    "pytorch": str(pytorch),
                    "files": [(file.st_size, file.st_mtime_ns) for file in files],
                    "libc": os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else None,
                }
            )
            with suppress(OSError):
                if note.read_text() == needed:
                    return True
            loaded = probe(isa, library)
            if loaded:
                with suppress(OSError):  # a read-only cache
                    note.write_text(needed)
            return loaded

        VecISA._probe_load = loads  # type: ignore[assignment, method-assign]
