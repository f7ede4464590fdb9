"""The identity of code: of a module by its source, of a cell by what it computes with, and how two compare."""

from __future__ import annotations

import hashlib
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.core.code_identity import code_identity, combined, compare, is_source, object_identity
from headway.core.errors import ConfigError
from headway.core.functions import load_function, name_of_function

CELL = """
import dataclasses, enum, functools, logging
import torch
from torch.nn import functional as F

ALPHA = 0.1
WEIGHTS = torch.tensor([1.0, 2.0])
NAMES = {"one", "two"}
def helper_of_sets(x): return x
STEPS = {len, functools.partial(print), lambda x: x + 1, helper_of_sets, abs}
log = logging.getLogger("mine")

class Kind(enum.Enum):
    FIRST = 1

@dataclasses.dataclass
class Settings:
    beta: float = 0.5

class Teacher(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(2))
    def forward(self, x):
        return self.scale * x

teacher = Teacher()
settings = Settings()

def helper(x):
    return x * ALPHA

def outer(gamma):
    def inner(x):
        return x + gamma
    return inner

closure = outer(3)
bound = functools.partial(helper)

def loss(logits, batch, k=2, *, m=4):
    "Sum it."
    found = F.relu(logits) + helper(logits) * k * m + (lambda z: z + 1)(3) + closure(1) + bound(2.0)
    log.debug("%s", NAMES, STEPS)
    return found + teacher(WEIGHTS) + settings.beta + Kind.FIRST.value
"""

EDITS = {
    "a global": ("ALPHA = 0.1", "ALPHA = 0.2"), "a tensor": ("[1.0, 2.0]", "[1.0, 3.0]"),
    "a set": ('"one", "two"', '"one", "three"'), "an enum": ("FIRST = 1", "FIRST = 2"),
    "a dataclass": ("beta: float = 0.5", "beta: float = 0.6"),
    "a teacher's weights": ("torch.ones(2)", "torch.zeros(2)"),
    "a method": ("self.scale * x", "self.scale / x"), "a helper": ("return x * ALPHA", "return x / ALPHA"),
    "what a closure holds": ("outer(3)", "outer(4)"), "an inner function": ("x + gamma", "x - gamma"),
    "a default": ("k=2", "k=3"), "a default of a keyword": ("m=4", "m=5"), "a lambda": ("z + 1", "z + 2"),
    "a name of a library": ("F.relu", "F.gelu"), "a partial": ("partial(helper)", "partial(helper, 2)"),
    "an object of a library": ('getLogger("mine")', 'getLogger("yours")'),
}  # fmt: skip


def run_cell(text: str, monkeypatch: pytest.MonkeyPatch, launcher: Path, name: str = "<ipython-input-1>") -> Any:
    """Run a cell as a kernel does: `__main__` is the module of the launcher, whatever cell it runs."""
    main = types.ModuleType("__main__")
    main.__file__ = str(launcher)
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile(text, name, "exec"), vars(main))
    return main


@pytest.fixture
def cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The identity of the function `loss` of a cell."""
    launcher = tmp_path / "ipykernel_launcher.py"
    launcher.write_text("start()\n")

    def identity(text: str, name: str = "<ipython-input-1>") -> str:
        main = run_cell(text, monkeypatch, launcher, name)
        return code_identity(main.loss, main, "loss")

    return identity


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_a_cell_changes_the_identity(edit: str, cell: Callable[..., str]) -> None:
    before, after = EDITS[edit]
    assert CELL.count(before) == 1
    first, second = cell(CELL), cell(CELL.replace(before, after))
    assert compare(first, second) == "changed" and not is_source(first)


def test_a_cell_that_runs_again_keeps_its_identity(cell: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    first = cell(CELL)
    moved = "# a comment\n\n" + CELL.replace("ALPHA = 0.1", "UNUSED = 7\nALPHA = 0.1")
    assert cell(moved, "<ipython-input-9>") == first
    main: Any = sys.modules["__main__"]
    exec(compile("def helper(x):\n    return x * ALPHA\n", "<ipython-input-2>", "exec"), vars(main))
    assert code_identity(main.loss, main, "loss") == first, "from a cell of its own"
    for _ in range(100):  # Python specialises the bytecode of what is called often
        main.loss(torch.ones(2), {})
    assert code_identity(main.loss, main, "loss") == first


def test_a_value_without_an_identity_is_refused_with_its_name(cell: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match=r"reads 'LOCK', lock, which has no identity") as caught:
        cell("import threading\nLOCK = threading.Lock()\ndef loss(a, b):\n    with LOCK:\n        return a\n")
    assert "in a module of its own" in (caught.value.fix or "")
    counter = "COUNT = 0\ndef loss(a, b):\n    global COUNT\n    COUNT += 1\n    return a\n"
    assert cell(counter) == cell(counter.replace("= 0", "= 5")), "what a function sets itself is no constant"


def test_two_helpers_that_change_their_names_are_noticed(cell: Callable[..., str]) -> None:
    text = "def one(x):\n    return x\ndef two(x):\n    return -x\ndef loss(a, b):\n    return one(a) + 2 * two(a)\n"
    swapped = text.replace("def one", "def other").replace("def two", "def one").replace("def other", "def two")
    assert cell(text) != cell(swapped)
    again = (
        "def fold(x):\n    return unfold(x)\ndef unfold(x):\n    return fold(x)\ndef loss(a, b):\n    return fold(a)\n"
    )
    assert cell(again) == cell(again) != cell(again.replace("return unfold(x)", "return unfold(-x)"))


def test_a_deep_chain_of_calls_and_what_a_library_has_wrapped_count(cell: Callable[..., str]) -> None:
    chain = "".join(f"def call{n}(x):\n    return call{n + 1}(x)\n" for n in range(2000))
    text = (
        f"import contextlib, functools, torch\n{chain}def call2000(x):\n    return x\n"
        "@contextlib.contextmanager\ndef managed():\n    yield 1\n"
        "@functools.lru_cache\ndef cached(x):\n    return 2\n"
        "@torch.no_grad()\ndef quiet(x):\n    return 3\n"
        "def loss(logits, batch):\n    with managed() as one:\n        return call0(one) + cached(1) + quiet(1)\n"
    )
    first = cell(text)
    assert cell(text) == first
    for before, after in (
        ("return x\n", "return -x\n"),
        ("yield 1", "yield 5"),
        ("turn 2", "turn 5"),
        ("turn 3", "turn 5"),
    ):
        assert text.count(before) == 1
        assert cell(text.replace(before, after)) != first, before


def test_a_function_of_a_module_is_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    real, names = tmp_path / "real_losses.py", tmp_path / "named_losses.py"
    real.write_text("def plain(a, b):\n    return a\n\nclass Own:\n    pass\n")
    names.write_text("from functools import partial\nfrom real_losses import Own, plain\nhalf = partial(plain, 1)\n")
    for name in ("real_losses", "named_losses"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    of_real, of_names = (hashlib.sha256(file.read_bytes()).hexdigest() for file in (real, names))
    found = {}
    for name in ("real_losses:plain", "named_losses:plain", "named_losses:Own", "named_losses:half"):
        module, value = load_function(name, "loss")
        found[name] = code_identity(value, module, "loss")
    assert found.pop("named_losses:half") not in (of_real, of_names), "both modules count"
    assert set(found.values()) == {of_real}, "the module that defines it, not the one that names it"
    module, native = load_function("math:fsum", "loss")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    expected = [f"built into Python {version}", hashlib.sha256(Path(module.__file__ or "").read_bytes()).hexdigest()]
    assert code_identity(native, module, "loss") in (expected if hasattr(module, "__file__") else expected[:1])


def test_identities_of_two_versions_of_python_cannot_be_compared() -> None:
    ours, source = f"python-3.11:{'a' * 64}", "b" * 64
    assert compare(ours, ours) == "same" and compare(ours, f"python-3.11:{'c' * 64}") == "changed"
    assert compare(ours, f"python-3.12:{'a' * 64}") == "another Python"
    assert compare(source, ours) == compare(ours, source) == compare("built into Python 3.11", ours) == "another kind"
    assert compare(source, "c" * 64) == "changed"
    assert combined([source, source]) == source and combined([ours, source]).startswith("python-")
    assert is_source(combined([source, "c" * 64])) and json.dumps(combined([source, ours]))


def test_an_object_of_a_script_counts_by_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "import threading\nclass Data:\n    def __init__(self):\n        self.lock = threading.Lock()\n"
        "    def __getitem__(self, n):\n        return n\nscript_log = []\nOPEN = threading.Lock()\n"
        "def loss(model, batch):\n    return OPEN, batch\n"
    )

    def identity(text: str) -> list[str]:
        main = run_cell(text, monkeypatch, tmp_path / "script.py")
        return [object_identity([type(main.Data())]), object_identity([main.loss])]

    assert identity(text) == identity(text + "script_log.append(1)\n")
    data, loss = identity(text.replace("return n", "return -n"))
    assert [data == identity(text)[0], loss == identity(text)[1]] == [False, True]
    assert object_identity([torch.nn.Linear]) == object_identity([torch.nn.Linear]) and is_source(
        object_identity([torch.nn.Linear])
    ), "a class of a library counts by its name"


def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = run_cell("def loss(a, b):\n    return a\n", monkeypatch, tmp_path / "launcher.py")
    assert name_of_function(main.loss, "loss") == "__main__:loss"
    first = main.loss
    exec("def loss(a, b):\n    return b\n", vars(main))
    with pytest.raises(ConfigError, match="leads to something else"):
        name_of_function(first, "loss")
    with pytest.raises(ConfigError, match="exists only in the script or notebook that defines it"):
        load_function("__main__:lost", "loss")
