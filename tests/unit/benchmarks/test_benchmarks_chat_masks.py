"""What the comparison of masks with those of marked templates says; it reads no template of others."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from support.chat import CHATML, MARKED

pytest.importorskip("transformers")
SCRIPT = Path(__file__).parents[3] / "benchmarks" / "data" / "chat_masks.py"
if not SCRIPT.exists():
    pytest.skip("the benchmarks are not part of this copy", allow_module_level=True)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("chat_masks", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_differences_are_shown_token_by_token(script: ModuleType) -> None:
    calls = "refused: the template ignores tool_calls of message 2, so its turn comes out empty"
    assert script.compared(CHATML, MARKED) == ["equal", "equal", "equal", calls]
    with_line_break = MARKED.replace(
        "<|im_end|>{% endgeneration %}{{ '\n' }}", "<|im_end|>{{ '\n' }}{% endgeneration %}"
    )
    assert script.compared(CHATML, with_line_break)[:2] == ["only TRL's: `⏎`", "only TRL's: `⏎` `⏎`"]
    one = "ours: `well and wide<\\|im_end\\|>`; TRL has none"
    assert script.compared(CHATML, CHATML)[0] == one


def test_a_date_stands_in_place_of_today(script: ModuleType) -> None:
    assert (
        script.dated("{% if strftime_now is defined %}{{ strftime_now('%Y') }}") == "{% if true %}{{ '26 Jul 2024' }}"
    )
