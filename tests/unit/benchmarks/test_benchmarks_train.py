"""What figures of speed, memory and overhead are made of; it is no test of how fast anything is."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
if not BENCHMARKS.exists():
    pytest.skip("the benchmarks are not part of this copy", allow_module_level=True)


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, Any]]:
    """The scripts, which find each other in their folder, under the names that they have there."""
    names = ("gate", "contender", "speed", "overhead", "neighbours")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        patch.syspath_prepend(BENCHMARKS / "train")
        for name in names:
            patch.delitem(sys.modules, name, raising=False)
        yield {name: importlib.import_module(name) for name in names}
        for name in names:
            del sys.modules[name]


@pytest.fixture
def contender(modules: dict[str, Any]) -> Any:
    return modules["contender"]


@pytest.fixture
def speed(modules: dict[str, Any]) -> Any:
    return modules["speed"]


@pytest.fixture
def overhead(modules: dict[str, Any]) -> Any:
    return modules["overhead"]


def ended(contender: Any, folder: Path, name: str, ends: list[float], warmup: int, exit_code: int = 0) -> Any:
    """A command that began at 100 s, finished steps at these times, and is over."""
    options = Namespace(warmup=warmup, threads=1, peers=None)
    command = object.__new__(contender.Command)  # which would start a process
    command.name, command.began, command.turns = name, 100.0, []
    command.work = SimpleNamespace(options=options, folder=folder, tokens_per_step=1000)
    command.process = SimpleNamespace(wait=lambda: exit_code)
    command._steps, command._log = folder / "steps", folder / "log"
    command._log.write_text("said\nwhy it failed")
    if name == "headway":
        records = [{"time": time, "train/loss": 3.0 - i} for i, time in enumerate(ends)]
        between = [{"time": ends[0] + 0.001, "evaluation/loss": 9.0}]
        command._steps.write_text("\n".join(map(json.dumps, [records[0], *between, *records[1:]])))
    else:
        command._steps.write_text("".join(f"{time}\n" for time in ends))
        (folder / f"{name}.json").write_text(json.dumps({"mean_loss": 2.0}))
    return command


@pytest.mark.parametrize("name", ["headway", "ceiling"])
def test_alone_all_steps_after_the_warm_up_count_with_all_between_them(
    contender: Any, tmp_path: Path, name: str
) -> None:
    command = ended(contender, tmp_path, name, [105.0, 106.0, 107.0, 107.5, 109.5], warmup=2)
    found = command.measured(peak_bytes=7)
    assert found.step_seconds == [1.0, 0.5, 2.0], "the third step begins where the second one ends"
    assert found.tokens_per_second == pytest.approx(3 * 1000 / 3.5)
    assert found.first_step_seconds == 5.0 and found.peak_bytes == 7
    assert found.mean_loss == pytest.approx(1.0 if name == "headway" else 2.0), "of all steps, of nothing but steps"


@pytest.mark.parametrize("name", ["headway", "ceiling"])
def test_in_turns_only_steps_that_began_and_ended_in_one_count(contender: Any, tmp_path: Path, name: str) -> None:
    command = ended(contender, tmp_path, name, [105.0, 106.0, 121.0, 122.0, 123.5, 141.0, 141.5], warmup=2)
    # Between them it was stopped: in 106 to 121, and in 123.5 to 141, though the latter step was begun before.
    command.turns = [(120.0, 124.0), (140.0, 142.0)]
    found = command.measured()
    assert found.step_seconds == [1.0, 1.5, 0.5] and found.peak_bytes is None
    assert found.tokens_per_second == pytest.approx(3 * 1000 / 3.0)


def test_what_cannot_be_measured_is_said(contender: Any, tmp_path: Path) -> None:
    command = ended(contender, tmp_path, "ceiling", [105.0, 121.0, 141.0], warmup=1)
    command.turns = [(120.0, 122.0), (140.0, 142.0)]
    with pytest.raises(RuntimeError, match="take more --steps"):
        command.measured()
    with pytest.raises(RuntimeError, match=r"(?s)exit code 3.*why it failed"):
        ended(contender, tmp_path, "ceiling", [105.0], warmup=1, exit_code=3).measured()


def run_of(contender: Any, speed: float, first: float = 1.0, peak: int | None = None) -> Any:
    return contender.Measured(speed, first, 2.0, 60.0, [0.1], peak)


def test_ratios_say_how_many_times_as_fast_we_are_and_are_those_that_the_gate_reads(
    modules: dict[str, Any], contender: Any, speed: Any
) -> None:
    """Of each round its own ratio: the machine was as fast for both in it, and not as in the others."""
    ours = [run_of(contender, *figures) for figures in ((200.0, 1.0), (60.0, 2.0), (300.0, 3.0))]
    theirs = [run_of(contender, *figures) for figures in ((100.0, 4.0), (20.0, 4.0), (300.0, 4.0))]
    alone = {
        "headway": [run_of(contender, 1.0, peak=4)],
        "ceiling": [run_of(contender, 1.0, peak=p) for p in (9, 2, 3)],
    }
    rows = speed.summary({"headway": ours, "ceiling": theirs}, alone)
    assert rows["ceiling"]["headway_speed_ratio"] == 2.0, "2, 3 and 1: more is better for us"
    assert rows["ceiling"]["headway_first_step_ratio"] == 0.5, "1/4, 2/4 and 3/4: less is"
    assert rows["ceiling"]["tokens_per_second"] == 100.0
    assert rows["headway"]["headway_speed_ratio"] == 1.0
    peaks = [rows["ceiling"][f"{which}peak_bytes"] for which in ("lowest_", "", "highest_")]
    assert peaks == [2, 3, 9] and rows["headway"]["peak_bytes"] == 4
    (ratio,) = modules["gate"].COMPARISONS["training"].ratios.values()
    assert ratio.of({"medians": rows}) == 2.0


def test_the_table_holds_ratios_against_their_limits_the_right_way_round(
    contender: Any, speed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(ours: float, first: float, peak: int) -> str:
        found = {
            "headway": [run_of(contender, ours, first)], "nanogpt": [run_of(contender, 100.0, 4.0)],
            "ceiling": [run_of(contender, 150.0, 1.0)],
        }  # fmt: skip
        alone = {name: [run_of(contender, 1.0, peak=peak if name == "headway" else 2**30)] for name in found}
        speed.show(speed.summary(found, alone), dict.fromkeys(found, False), {})
        return capsys.readouterr().out

    good, bad = shown(ours=150.0, first=1.0, peak=2**29), shown(ours=120.0, first=3.0, peak=2**31)
    assert good.count(", met (") == 4 and "MISSED" not in good
    assert bad.count("MISSED") == 4 and ", met (" not in bad
    assert "speed of the best peer's (nanogpt): 1.50, met (at least 1.3)" in good
    assert "memory of the smallest peer's (nanogpt): 2.00, MISSED (at most 1.0)" in bad


def test_memory_is_that_of_several_runs_alone_of_the_way_that_was_faster(
    contender: Any, speed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[str, bool]] = []

    def run(name: str, compiled: bool, work: Any) -> Any:
        tried.append((name, compiled))
        if name == "litgpt":
            raise RuntimeError("first line\nit is not installed")
        return run_of(contender, 200.0 if compiled else 100.0, peak=len(tried))

    monkeypatch.setattr(speed, "run", run)
    work = SimpleNamespace(options=Namespace(compile="best", peaks=4))
    chosen, alone, missing = speed.choose(["headway", "litgpt", "products"], work)
    assert chosen == {"headway": True, "products": False} and missing == {"litgpt": "it is not installed"}
    ours = [compiled for name, compiled in tried if name == "headway"]
    # The second one alone fills the compiler's cache; the last two are for memory.
    assert ours == [False, True, True, False, True, True, True]
    assert [one.peak_bytes for one in alone["headway"]] == [3, 5, 6, 7]
    assert len(alone["products"]) == 4


def test_nothing_of_a_run_is_turned_off(speed: Any, tmp_path: Path) -> None:
    work = object.__new__(speed.Workload)  # which would prepare data
    work.folder, work.steps = tmp_path, 3
    work.options = Namespace(vocabulary=8, preset="1m", sequence_length=8, rows=1, precision="fp32")
    assert all(key.endswith("_seconds") for key in work._settings()["supervise"])


def test_the_whole_script_leaves_what_it_measured_in_a_file(
    modules: dict[str, Any],
    contender: Any,
    speed: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Command:
        def __init__(self, name: str, compiled: bool, work: Any) -> None:
            self.name, self.process = name, SimpleNamespace(poll=lambda: 0)

        def wait_for(self, steps: int) -> None:
            pass

        stop = kill = lambda self: None

        def measured(self) -> Any:
            return run_of(contender, 90.0 if self.name == "ceiling" else 45.0)

    monkeypatch.setattr(speed, "Command", Command)
    monkeypatch.setattr(speed, "Workload", lambda *_: SimpleNamespace(parameters=1e6, options=_[0]))
    monkeypatch.setattr(speed, "run", lambda *_: run_of(contender, 50.0, peak=2**30))
    output = tmp_path / "result.json"
    comparison = modules["gate"].COMPARISONS["training"]
    monkeypatch.setattr(sys, "argv", ["speed.py", *comparison.arguments, "--output", str(output)])
    speed.main()
    record = json.loads(output.read_text())
    (ratio,) = comparison.ratios.values()
    assert ratio.of(record) == 0.5
    assert [len(runs) for runs in record["alone"].values()] == [3, 3], "as many as memory is taken from by itself"
    said = capsys.readouterr().out
    assert "medians of 1 rounds, of memory of 3 runs" in said and "1.00 to 1.00" in said


def test_the_overhead_is_what_ours_takes_longer_in_the_median_of_the_rounds(overhead: Any) -> None:
    found = {"headway": [0.0098, 0.0300, 0.0125], "bare": [0.0090, 0.0280, 0.0120]}
    assert overhead.differences(found) == pytest.approx([0.0008, 0.002, 0.0005])
    text = overhead.report(found, load=0.5)
    assert "overhead   0.80 ms a step (0.50 to 2.00 over 3 rounds; load 0.5)" in text
    assert "of a step of 100 ms: 0.8%, met (at most 1%)" in text
    slower = {**found, "headway": [0.0105, 0.0300, 0.0135]}
    assert "of a step of 100 ms: 1.5%, MISSED" in overhead.report(slower, load=0.5)


def test_the_overheads_script_leaves_what_it_measured_in_a_file(
    overhead: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(overhead.speed, "Workload", lambda *_: None)
    monkeypatch.setattr(overhead, "in_turns", lambda names, work: {"headway": 0.012, "bare": 0.010})
    monkeypatch.setattr(sys, "argv", ["overhead.py", "--rounds", "2", "--output", str(tmp_path / "result.json")])
    overhead.main()
    record = json.loads((tmp_path / "result.json").read_text())
    assert record["overhead_seconds"] == pytest.approx(0.002) and record["seconds"]["bare"] == [0.010, 0.010]
    assert "2.0%, MISSED" in capsys.readouterr().out


def test_contenders_of_the_overhead_take_turns_and_none_is_left_behind(
    overhead: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    class Command:
        def __init__(self, name: str, compiled: bool, work: Any) -> None:
            self.name, self.left = name, 2
            self.process = SimpleNamespace(poll=lambda: None if self.left else 0)

        def wait_for(self, steps: int) -> None:
            calls.append(f"{self.name} warms up {steps}")

        def stop(self) -> None:
            pass

        def turn(self, steps: int) -> None:
            calls.append(self.name)
            self.left -= 1

        def measured(self) -> Any:
            if self.name == "broken":
                raise RuntimeError("it failed")
            return SimpleNamespace(step_seconds=[0.1, 0.3])

        def kill(self) -> None:
            calls.append(f"{self.name} ends")

    monkeypatch.setattr(overhead, "Command", Command)
    work = SimpleNamespace(options=Namespace(warmup=5))
    assert overhead.in_turns(["headway", "bare"], work) == {"headway": pytest.approx(0.2), "bare": pytest.approx(0.2)}
    turns = ["headway", "bare"] * 2
    assert calls == ["headway warms up 5", "bare warms up 5", *turns, "headway ends", "bare ends"]
    calls.clear()
    with pytest.raises(RuntimeError):
        overhead.in_turns(["broken", "bare"], work)
    assert calls[-2:] == ["broken ends", "bare ends"]


def test_a_turn_is_from_before_its_process_goes_on_until_its_steps_are_done(
    contender: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ended(contender, tmp_path, "ceiling", [105.0, 106.0], warmup=1)
    clock, sent, left = [200.0], list[int](), [200.4, 200.9, 201.4]

    def poll() -> None:
        """A step is done."""
        clock[0] = left.pop(0)
        with command._steps.open("a") as file:
            file.write(f"{clock[0]}\n")

    def send(number: int) -> None:
        sent.append(number)
        clock[0] += 0.05

    command.process = SimpleNamespace(poll=poll)
    monkeypatch.setattr(command, "_send", send)
    monkeypatch.setattr(contender, "time", SimpleNamespace(time=lambda: clock[0], sleep=lambda _: None))
    command.turn(2)
    assert command.turns == [(200.0, 200.9)] and sent == [signal.SIGCONT, signal.SIGSTOP] and left == [201.4]


def test_a_round_that_was_not_measured_whole_counts_for_nobody(
    speed: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[str] = []

    class Command:
        failing = 1  # the round in which a peer fails

        def __init__(self, name: str, compiled: bool, work: Any) -> None:
            self.name, self.process = name, SimpleNamespace(poll=lambda: 0)

        def wait_for(self, steps: int) -> None:
            pass

        def stop(self) -> None:
            pass

        def measured(self) -> Any:
            number = len(ended) // 2
            if self.name == "peer" and number == Command.failing:
                raise RuntimeError("peer: no step")
            return SimpleNamespace(tokens_per_second=100.0 + number)

        def kill(self) -> None:
            ended.append(self.name)

    monkeypatch.setattr(speed, "Command", Command)
    work = SimpleNamespace(options=Namespace(warmup=5, rounds=3))
    found = speed.take_turns({"headway": True, "peer": True}, work)
    assert {name: [one.tokens_per_second for one in runs] for name, runs in found.items()} == {
        "headway": [100.0, 102.0],
        "peer": [100.0, 102.0],
    }
    assert sorted(ended) == ["headway"] * 3 + ["peer"] * 3, "none is left behind"
    assert "round 2 of 3 counts for nobody: peer: no step" in capsys.readouterr().err
    Command.failing, work.options.rounds = 0, 1
    ended.clear()
    with pytest.raises(SystemExit, match="no round"):
        speed.take_turns({"headway": True, "peer": True}, work)


def test_neighbours_are_set_against_the_plain_loop_and_a_fair_share(modules: dict[str, Any]) -> None:
    found = {"plain": {0: 8.0, 2: 0.5}, "trainer": {0: 8.0, 2: 3.0}}
    *_, quiet, busy = modules["neighbours"].table(found, cores=2, threads=2).splitlines()
    assert quiet.split() == ["0", "8.00", "8.00", "1.00", "1.00"]
    assert busy.split() == ["2", "0.50", "3.00", "6.00", "0.75"], "two of four that want two processors"


def test_a_neighbours_contender_is_measured_between_the_ends_of_steps(modules: dict[str, Any], tmp_path: Path) -> None:
    neighbours = modules["neighbours"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours, "SETTLE_SECONDS", 0.1)
        patch.setattr(neighbours, "CONTENDERS", ())
        count = tmp_path / "x.count"
        count.write_bytes(bytes(8))
        code = "import struct, sys, time\nn = 0\nwhile True:\n time.sleep(0.02); n += 1; "
        code += "open(sys.argv[1], 'r+b').write(struct.pack('q', n))"
        process = subprocess.Popen([sys.executable, "-S", "-c", code, str(count)])
        try:
            assert 5 < neighbours.Contender("x", process, count).measure(0.3) <= 60
        finally:
            process.kill()
            process.wait()
