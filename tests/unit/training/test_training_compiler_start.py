"""What a process does before its first code is compiled, and what it no longer does."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headway.training.setup import compiler_start
from headway.training.setup.compiler_start import start_compiler


@pytest.fixture
def first_start() -> Iterator[None]:
    start_compiler.cache_clear()
    yield
    start_compiler.cache_clear()


@pytest.mark.usefixtures("first_start")
def test_vector_instructions_are_tried_once_beside_what_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tries at a time would see each other's flags, and code would be compiled for other instructions."""
    from torch._inductor import codecache, cpu_vec_isa

    begun, go_on, read = list[threading.Thread](), threading.Event(), threading.Event()

    def tries() -> list[cpu_vec_isa.VecISA]:
        begun.append(threading.current_thread())
        assert go_on.wait(60)
        return [cpu_vec_isa.VecAVX2()]

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", tries)
    monkeypatch.setattr(compiler_start, "_cache_instruction_checks", lambda: None)
    headers = codecache.CppPythonBindingsCodeCache
    monkeypatch.setattr(headers, "load_pybinding_async", lambda *_: read.set())
    start_compiler("cuda")
    assert cpu_vec_isa.valid_vec_isa_list is tries
    for _ in range(2):
        start_compiler("cpu")
    threading.Timer(0.1, go_on.set).start()
    assert isinstance(cpu_vec_isa.pick_vec_isa(), cpu_vec_isa.VecAVX2)
    assert read.wait(60)
    assert len(begun) == 1
    assert begun[0] is not threading.current_thread()


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The libraries that were loaded for a try; those with "bad" in their names could not be."""
    from torch._inductor.cpu_vec_isa import VecISA

    if not hasattr(VecISA, "_probe_load"):
        pytest.skip("this PyTorch has no part of its own for loading what it tries with")
    tried: list[str] = []

    def load(isa: VecISA, library: str) -> bool:
        tried.append(Path(library).name)
        return "bad" not in library

    monkeypatch.setattr(VecISA, "_probe_load", load)
    compiler_start._cache_instruction_checks()
    return tried


def loads(library: Path) -> bool:
    from torch._inductor.cpu_vec_isa import VecAVX2

    return VecAVX2()._probe_load(str(library))


def test_a_library_that_has_loaded_is_not_loaded_again_until_it_is_another(tried: list[str], tmp_path: Path) -> None:
    library = tmp_path / "code.so"
    library.write_bytes(b"one")
    assert loads(library) and loads(library) and tried == ["code.so"]
    library.write_bytes(b"another")
    assert loads(library) and loads(library) and len(tried) == 2


def test_a_library_that_has_loaded_with_another_pytorch_is_loaded_again(
    tried: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "code.so"
    library.write_bytes(b"one")
    assert loads(library)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cpu.so").write_bytes(b"other")
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    assert loads(library) and loads(library) and len(tried) == 2


def test_a_library_that_has_not_loaded_is_tried_again(tried: list[str], tmp_path: Path) -> None:
    library = tmp_path / "bad.so"
    library.write_bytes(b"one")
    assert not loads(library) and not loads(library) and len(tried) == 2


def test_a_cache_that_cannot_be_written_to_costs_a_try_only(tried: list[str], tmp_path: Path) -> None:
    library = tmp_path / "code.so"
    library.write_bytes(b"one")
    (tmp_path / "code.so.loaded").mkdir()
    assert loads(library) and loads(library) and len(tried) == 2


@pytest.mark.slow
def test_vector_instructions_are_the_same_whether_tries_are_remembered_or_not() -> None:
    """In processes of their own: each asks once."""
    code = """
from torch._inductor import cpu_vec_isa
from headway.training.setup.compiler_start import _cache_instruction_checks
{}
print([(str(isa), isa.build_arch_flags()) for isa in cpu_vec_isa.valid_vec_isa_list()])
"""
    answers = [
        subprocess.run(
            [sys.executable, "-c", code.format(how)], check=True, capture_output=True, text=True, timeout=300
        ).stdout
        for how in ("", "_cache_instruction_checks()", "_cache_instruction_checks()")
    ]
    assert answers[0] and len(set(answers)) == 1
