"""What the regression gate says of ratios; it is no test of how fast anything is."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

GATE = Path(__file__).parents[3] / "benchmarks" / "gate.py"
if not GATE.exists():
    pytest.skip("the benchmarks are not part of this copy", allow_module_level=True)


@pytest.fixture(scope="module")
def gate() -> Any:
    spec = importlib.util.spec_from_file_location("headway_gate", GATE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_a_median_that_fell_by_over_a_tenth_is_a_drop_unless_a_repeat_still_reaches_it(gate: Any) -> None:
    committed = {"a": 2.0, "b": 2.0, "c": 2.0, "d": 2.0, "e": 2.0}
    found = {
        "a": [1.81, 1.8, 1.82], "b": [1.79, 1.7, 1.9], "c": [1.79, 1.7, 2.0], "d": [2.3, 2.1, 2.4], "new": [3.0],
    }  # fmt: skip
    verdicts = {v.name: v for v in gate.judge(found, committed)}
    states = {name: v.state for name, v in verdicts.items()}
    assert states == {"a": "same", "b": "DROPPED", "c": "noise", "d": "better", "e": "n/a", "new": "new"}
    assert verdicts["b"].change == pytest.approx(-0.105) and verdicts["new"].change is None
    assert "1.70 to 1.90  DROPPED" in gate.table(list(verdicts.values()))
    # What was not measured stays as it was.
    kept = gate.accepted(list(verdicts.values()), committed)
    assert kept == {"a": 1.81, "b": 1.79, "c": 1.79, "d": 2.3, "e": 2.0, "new": 3.0}


def test_a_ratio_is_where_it_is_said_or_nowhere(gate: Any) -> None:
    record = {"rows": [{"ours": 2.0, "theirs": 5.0, "none": None, "zero": 0.0}]}
    assert gate.Ratio(("rows", 0, "theirs"), over=("rows", 0, "ours")).of(record) == 2.5
    for path, over in ((("rows", 0, "none"), None), (("rows", 1), None), (("rows", 0, "ours"), ("rows", 0, "zero"))):
        assert gate.Ratio(path, over).of(record) is None


def test_what_cannot_be_measured_is_left_out_and_said(gate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = gate.Ratio(("ratio",))
    scripts = {
        "gone": gate.Comparison("no/such.py", (), {"x": ours}),
        "lacks": gate.Comparison("gate.py", (), {"x": ours}, needs=("no_such_module",)),
        "fails": gate.Comparison("gate.py", ("--no-such-option",), {"x": ours}),
    }
    monkeypatch.setattr(gate, "COMPARISONS", scripts)
    found, left_out = gate.measure(list(scripts), repeats=1)
    assert not found and left_out["gone"] == "there is no no/such.py"
    assert left_out["lacks"] == "no_such_module is not installed"
    assert left_out["fails"].startswith("FAILED: ")


def test_only_strict_ends_with_an_error_and_accepting_makes_it_the_rule(
    gate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ratios = tmp_path / "ratios.json"
    ratios.write_text(json.dumps({"machines": {}, "ratios": {"feed: x": 2.0}}))
    monkeypatch.setattr(gate, "measure", lambda *_: ({"feed: x": [1.0]}, {}))

    def run(*options: str) -> None:
        monkeypatch.setattr(sys, "argv", ["gate.py", "--only", "feed", "--ratios", str(ratios), *options])
        gate.main()

    run()
    assert "dropped by over 10%: feed: x" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run("--strict")
    run("--accept")
    assert json.loads(ratios.read_text())["ratios"] == {"feed: x": 1.0}
    run("--strict")


def test_accepting_some_ratios_does_not_say_that_the_others_were_measured_on_this_machine(
    gate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ratios, there = tmp_path / "ratios.json", {"cpu": "another"}
    committed = {"feed: x": 2.0, "packing: x": 2.0, "checkpoint: x": 2.0, "checkpoint: y": 2.0}
    ratios.write_text(
        json.dumps({"machines": dict.fromkeys(("feed", "packing", "checkpoint"), there), "ratios": committed})
    )
    monkeypatch.setattr(gate, "machine", lambda: {"cpu": "this one"})
    monkeypatch.setattr(gate, "measure", lambda *_: ({"feed: x": [2.0], "checkpoint: x": [2.0]}, {}))

    def elsewhere(*options: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["gate.py", "--ratios", str(ratios), *options])
        gate.main()
        return [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if "another machine" in line]

    assert elsewhere("--only", "feed", "checkpoint", "--accept") == ["feed", "checkpoint"]
    machines = json.loads(ratios.read_text())["machines"]
    # Of "checkpoint" only one of two ratios was measured.
    assert machines == {"feed": {"cpu": "this one"}, "packing": there, "checkpoint": there}
    assert elsewhere("--only", "feed", "packing", "checkpoint") == ["packing", "checkpoint"]


def test_the_committed_ratios_say_what_machine_they_are_of(gate: Any) -> None:
    committed = json.loads((GATE.parent / "ratios.json").read_text())
    assert set(committed["machines"]) == {name.partition(":")[0] for name in committed["ratios"]}
    assert all(committed["machines"].values())


def test_every_comparison_is_a_script_that_takes_its_arguments(gate: Any) -> None:
    for name, comparison in gate.COMPARISONS.items():
        script = GATE.parent / comparison.script
        if not script.exists():
            continue
        text = script.read_text()
        options = [argument for argument in comparison.arguments if argument.startswith("--")]
        assert all(f'"{option}"' in text for option in [*options, "--output"]), name
