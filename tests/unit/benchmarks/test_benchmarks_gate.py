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
    found, left_out, promises = gate.measure(list(scripts), repeats=1)
    assert not found and not promises and left_out["gone"] == "there is no no/such.py"
    assert left_out["lacks"] == "no_such_module is not installed"
    assert left_out["fails"].startswith("FAILED: ")


def test_only_strict_ends_with_an_error_and_accepting_makes_it_the_rule(
    gate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ratios, here, used = tmp_path / "ratios.json", gate.machine(), gate.versions()
    ratios.write_text(json.dumps({here: {"feed": {**used, "ratios": {"x": 2.0}}}}))
    monkeypatch.setattr(gate, "measure", lambda *_: ({"feed: x": [1.0]}, {}, []))

    def run(*options: str) -> None:
        monkeypatch.setattr(sys, "argv", ["gate.py", "--only", "feed", "--ratios", str(ratios), *options])
        gate.main()

    run()
    assert "dropped by over 10%: feed: x" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run("--strict")
    run("--accept")
    assert json.loads(ratios.read_text()) == {here: {"feed": {**used, "ratios": {"x": 1.0}}}}
    run("--strict")


@pytest.mark.parametrize(
    ("times", "state"), [([1.1, 1.2, 1.9], "met"), ([1.1, 1.3, 1.3], "noise"), ([1.21, 1.3, 1.4], "MISSED")]
)
def test_what_a_script_promises_is_held_against_its_limit_whatever_was_committed(
    gate: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    times: list[float],
    state: str,
) -> None:
    """A ratio that was committed when it was bad already never drops."""
    script = tmp_path / "save.py"
    script.write_text(
        "import json, pathlib, sys\n"
        "left = json.loads(pathlib.Path(__file__).with_suffix('.json').read_text())\n"
        "promise = {'what': 'stall', 'times': left.pop(0), 'at_most': 1.2}\n"
        "pathlib.Path(__file__).with_suffix('.json').write_text(json.dumps(left))\n"
        "pathlib.Path(sys.argv[2]).write_text(json.dumps({'ratio': 0.7, 'promises': [promise]}))\n"
        "sys.exit(promise['times'] > 1.2)\n"
    )
    script.with_suffix(".json").write_text(json.dumps(times))
    monkeypatch.setattr(gate, "HERE", tmp_path)
    monkeypatch.setattr(gate, "COMPARISONS", {"save": gate.Comparison("save.py", (), {"copy": gate.Ratio(("ratio",))})})
    ratios, output = tmp_path / "ratios.json", tmp_path / "all.json"
    ratios.write_text(json.dumps({gate.machine(): {"save": {**gate.versions(), "ratios": {"copy": 0.7}}}}))
    monkeypatch.setattr(sys, "argv", ["gate.py", "--ratios", str(ratios), "--strict", "--output", str(output)])
    if state == "MISSED":
        with pytest.raises(SystemExit):
            gate.main()
    else:
        gate.main()
    out = capsys.readouterr().out
    assert f"save: stall: {times[1]:.2f} times ({times[0]:.2f} to {times[2]:.2f}), {state} (at most 1.2)" in out
    assert "dropped by over" not in out and "FAILED" not in out
    (promise,) = json.loads(output.read_text())["promises"]
    assert (promise["repeats"], promise["state"]) == (times, state)


def test_a_script_that_breaks_after_its_results_has_failed(
    gate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.py").write_text("import pathlib, sys; pathlib.Path(sys.argv[2]).write_text('{}'); 1 / 0")
    monkeypatch.setattr(gate, "HERE", tmp_path)
    assert gate.run(gate.Comparison("x.py", (), {})) == (None, "ZeroDivisionError: division by zero")


def test_accepting_keeps_what_was_not_measured_with_what_it_was_measured_with(gate: Any) -> None:
    then, now = {"python": "3.11", "torch": "2.11"}, {"python": "3.12", "torch": "2.13"}
    committed = {
        "feed": {**then, "ratios": {"x": 2.0}},
        "packing": {**then, "ratios": {"x": 2.0}},
        "checkpoint": {**then, "ratios": {"x": 2.0, "y": 2.0}},
    }
    verdicts = gate.judge(
        {"feed: x": [1.0], "checkpoint: x": [1.0], "model: a: b": [3.0004]},
        gate.ratios_of(committed, ["feed", "checkpoint", "model"]),
    )
    assert gate.accepted(verdicts, committed, now) == {
        "checkpoint": {**then, "ratios": {"x": 1.0, "y": 2.0}},
        "feed": {**now, "ratios": {"x": 1.0}},
        "model": {**now, "ratios": {"a: b": 3.0}},
        "packing": {**then, "ratios": {"x": 2.0}},
    }


def test_ratios_of_another_machine_are_no_measure_for_this_one(
    gate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ratios = tmp_path / "ratios.json"
    there = {"feed": {"python": "3.11", "torch": "2.11", "ratios": {"x": 9.0}}}
    ratios.write_text(json.dumps({"there": there}))
    monkeypatch.setattr(gate, "machine", lambda: "here")
    monkeypatch.setattr(gate, "measure", lambda *_: ({"feed: x": [1.0]}, {}, []))

    def run(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["gate.py", "--only", "feed", "--ratios", str(ratios), *options])
        gate.main()
        return capsys.readouterr().out

    out = run()
    assert "no ratios are committed of here; of: there" in out and "dropped" not in out
    with pytest.raises(SystemExit):  # it cannot tell
        run("--strict")
    capsys.readouterr()
    run("--accept")
    assert json.loads(ratios.read_text())["there"] == there
    assert "committed of" not in run("--strict")
    monkeypatch.setattr(gate, "versions", lambda: {"python": "3.13", "torch": "3.0"})
    assert "; this is python 3.13, torch 3.0" in run()


def test_the_committed_ratios_are_of_comparisons_that_there_are(gate: Any) -> None:
    for machine, committed in json.loads((GATE.parent / "ratios.json").read_text()).items():
        assert machine
        for name, record in committed.items():
            assert set(record) == {*gate.versions(), "ratios"}
            assert set(record["ratios"]) <= set(gate.COMPARISONS[name].ratios)


def test_every_comparison_is_a_script_that_takes_its_arguments(gate: Any) -> None:
    for name, comparison in gate.COMPARISONS.items():
        script = GATE.parent / comparison.script
        if not script.exists():
            continue
        text = script.read_text()
        options = [argument for argument in comparison.arguments if argument.startswith("--")]
        assert all(f'"{option}"' in text for option in [*options, "--output"]), name
