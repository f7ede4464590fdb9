"""What a report says, against numbers that were worked out by hand."""

from __future__ import annotations

import csv
import io
import re
import sys
from pathlib import Path

import pytest

from headway.core.errors import ConfigError, DataError
from headway.core.statistics import quantile
from headway.lab.bench.analysis import MEMORY, SPEED, compare, efficiency, ideal_efficiency, mean
from headway.lab.bench.comparison import changes, other_conditions
from headway.lab.bench.findings import findings
from headway.lab.bench.report import load_report, write_report
from headway.lab.bench.results import write_result
from headway.lab.bench.statistics import difference, mean_of
from headway.lab.bench.suite import STRATEGIES, load_suite
from headway.lab.bench.wording import sentence
from support.bench import MIB, result

# Means 100 and 82; s² = 1 and 1, n = 3: t = 18 / sqrt(2/3) = 22.0, and t(4 degrees) = 2.776.
DDP = result("ddp", 2, [99.0, 100.0, 101.0], memory_mib=100.0)
ZERO3 = result("zero3", 2, [81.0, 82.0, 83.0], memory_mib=57.0)
# Means 100 and 98; s² = 1 and 36: t = 2 / sqrt(37/3) = 0.57.
NOISY = result("zero1", 2, [92.0, 98.0, 104.0], memory_mib=[99.0, 100.0, 101.0])


def test_intervals_are_students() -> None:
    found = mean_of([99.0, 100.0, 101.0])
    # s = 1, t(2) = 4.3027, so 4.3027 / sqrt(3).
    assert found is not None and found.value == 100 and found.half_width == pytest.approx(2.48416, abs=1e-4)
    assert mean_of([]) is None and mean_of([5.0]).half_width is None  # type: ignore[union-attr]
    assert quantile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.5 and quantile([1.0, 2.0, 3.0, 4.0, 5.0], 0.95) == 4.8


def test_differences_are_told_only_where_the_repeats_can() -> None:
    assert difference([99, 100, 101], [81, 82, 83]).is_significant  # type: ignore[union-attr]
    assert not difference([99, 100, 101], [92, 98, 104]).is_significant  # type: ignore[union-attr]
    # Welch: s² = 1 and 0, so t = 4 / sqrt(1/3) = 6.93 with 2 degrees (4.30); 2.4 would not do.
    assert difference([103, 104, 105], [100, 100, 100]).is_significant  # type: ignore[union-attr]
    assert not difference([101.4, 102.4, 103.4], [100, 100, 100]).is_significant  # type: ignore[union-attr]
    assert not difference([500], [100, 100]).is_significant, "one repeat knows nothing of repeats"  # type: ignore[union-attr]
    assert difference([], [1.0]) is None and difference([1.0], [0.0]) is None


def test_sentences_say_what_can_be_told() -> None:
    assert sentence(ZERO3, DDP) == "zero3 needs 43 % less memory than ddp and is 18 % slower here"
    assert sentence(NOISY, DDP) == "Between zero1 and ddp there is no difference that the repeats can tell"
    lean = result("zero1", 2, [92.0, 98.0, 104.0], memory_mib=125.0)
    assert sentence(lean, DDP) == (
        "zero1 needs 25 % more memory than ddp, with no difference in speed that the repeats can tell,"
    )
    heavy = result("zero1", 2, [299.0, 300.0, 301.0], memory_mib=250.0)
    assert sentence(heavy, DDP) == "zero1 needs 2.5 times as much memory as ddp and is 3.0 times as fast here"
    once = result("zero3", 2, [10.0])
    assert sentence(once, result("ddp", 2, [100.0])) == (
        "zero3 cannot be compared with ddp: measured once, so no comparison is possible"
    )


def test_efficiency_is_speed_per_worker_by_that_of_the_fewest() -> None:
    cells = [result("ddp", workers, [speed]) for workers, speed in ((1, 100.0), (2, 180.0), (4, 240.0))]
    lonely = result("zero3", 4, [50.0])
    assert [efficiency(cell, cells) for cell in cells] == [None, 0.9, 0.6]
    assert efficiency(lonely, [*cells, lonely]) is None
    few = result("ddp", 4, [240.0], cores=2)
    assert ideal_efficiency(few) == 0.5 and ideal_efficiency(result("ddp", 4, [1.0], device_type="cuda", cores=2)) == 1
    assert mean(few, MEMORY).value == 100 * MIB and compare(few, cells[0], SPEED).ratio == 2.4  # type: ignore[union-attr]


def test_results_under_other_conditions_are_never_compared() -> None:
    other = DDP.model_copy(update={"environment": {"hardware": {"cores_usable": 99}}})
    assert not [text for text in findings([other, ZERO3]) if "ddp" in text and "zero3" in text]
    assert [text for text in findings([DDP, ZERO3]) if "zero3 needs 43 % less memory than ddp" in text]


def test_findings_name_what_failed_what_is_left_out_and_losses_that_differ() -> None:
    said = findings(
        [
            DDP,
            ZERO3.model_copy(),
            result("zero1", 2, failure=("killed", "worker 1 died (signal 9)")),
            result("zero2", 2, [90.0], failure=("timeout", "not done after 5 s")),
            result("deepspeed_zero2", 2, failure=("excluded", "not wanted")),
            result("fsdp", 2, [81.0, 82.0, 83.0], mean_loss=3.3, memory_mib=57.0),
        ]
    )
    text = "\n".join(said)
    assert said[0] == "1 of 6 cells did not succeed:"
    assert "- zero1-w2-1m-fp32-b1-t64: killed: worker 1 died (signal 9)" in said
    assert "only 1 repeat succeeded: timeout: not done after 5 s" in text and "excluded: not wanted" in text
    assert "Warning: on 2 workers strategies do not have the same loss" in text and "fsdp 3.3000" in text
    assert "fsdp and zero3 are two names of one strategy" in text
    assert "Fastest on 2 workers: ddp with 100" in text
    assert "1 cell was left out by the suite:" in said


def test_two_names_of_one_strategy_say_how_far_to_trust_the_rest() -> None:
    def told(fsdp: float) -> str:
        alias = result("fsdp", 2, [fsdp - 1, fsdp, fsdp + 1], memory_mib=57.0)
        return "\n".join(findings([DDP, ZERO3, alias]))

    assert "zero3 needs 43 % less memory than ddp and is 18 % slower here on 2 workers." in told(82.0)
    # 60 by 82 is further than 82 by 100.
    assert "zero3 needs 43 % less memory than ddp, with no difference in speed" in told(60.0)


def test_a_busy_machine_and_impossible_scaling_are_said() -> None:
    busy = [repeat.model_copy(update={"busy_before": 0.8}) for repeat in DDP.repeats]
    assert "Other programs used 80 % of the processors" in findings([DDP.model_copy(update={"repeats": busy})])[0]
    quiet = [repeat.model_copy(update={"busy_before": 0.02}) for repeat in DDP.repeats]
    assert not [t for t in findings([DDP.model_copy(update={"repeats": quiet})]) if "Other programs" in t]
    cells = [result("ddp", 1, [10.0, 10.1]), result("ddp", 4, [40.0, 40.1], cores=2)]
    cells[0] = cells[0].model_copy(update={"environment": cells[1].environment})
    text = "\n".join(findings(cells))
    assert "allow 50 %, so one worker had less of the machine when measured" in text


def test_what_the_cores_allow_is_counted_from_the_fewest_workers_too() -> None:
    cells = [result("ddp", 4, [40.0, 40.1], cores=2), result("ddp", 8, [38.0, 38.1], cores=2)]
    assert ideal_efficiency(cells[1]) == 0.25 and ideal_efficiency(cells[1], cells[0]) == 0.5
    text = "\n".join(findings(cells))
    assert "48 % of what as many times the workers would ideally do; the cores there are allow 50 % (weak" in text


def test_every_sentence_says_which_of_several_settings_it_is_about() -> None:
    shares = {"steps": 2, "total_share": 0.5, "exposed_share": 0.3, "overlapped_share": 0.2}
    cells = [
        result("ddp", workers, [speed, speed + 1], model=model, communication=shares if workers > 1 else None)
        for model, speed in (("1m", 100.0), ("4m", 50.0))
        for workers in (1, 2)
    ]
    said = findings(cells)
    assert said[0] == "What follows is of fp32, micro-batches of 1 x 64 tokens, weak scaling."
    assert [text for text in said[1:] if not text.startswith("- ")] == ["1m:", "4m:"]
    assert len(said) == 7 and "fp32" not in "".join(said[1:])
    elsewhere = DDP.model_copy(update={"environment": {"hardware": {"cpu": "another"}}, "key": "other"})
    said = findings([DDP, ZERO3, elsewhere, ZERO3])
    assert f"Conditions {DDP.conditions}:" in said and [text for text in said if text.startswith("- zero3")]


def test_cells_that_were_measured_once_are_not_said_to_be_alike() -> None:
    once = [result("ddp", 2, [100.0], memory_mib=100.0), result("zero3", 2, [50.0], memory_mib=50.0)]
    said = findings(once)
    assert said[0].startswith("Each cell was measured once")
    assert said[1] == "Fastest on 2 workers in one measurement: ddp with 100 tokens/s."
    assert len(said) == 2
    assert load_suite("memory").repeats > 1, "its question is how memory differs"


def test_a_difference_that_would_be_shown_as_none_is_none() -> None:
    near = result("zero1", 2, [99.0, 100.0, 101.0], memory_mib=100.01)
    assert sentence(near, DDP) == "Between zero1 and ddp there is no difference that the repeats can tell"


def test_a_comparison_pairs_like_with_like_and_says_what_else_differs() -> None:
    def on(cpu: str, speed: float, steps: int = 10):  # type: ignore[no-untyped-def]
        found = result("ddp", 2, [speed - 1, speed, speed + 1])
        environment = {"hardware": {"cpu": cpu, "cores_usable": 8}, "source": cpu}
        settings = {**found.settings, "steps": steps}
        return found.model_copy(update={"environment": environment, "settings": settings, "key": f"{cpu}{steps}"})

    assert other_conditions([on("A", 100.0)], [on("A", 110.0)]) is None
    assert other_conditions([on("A", 100.0)], [on("B", 110.0, 20)]) == (
        "Not only time has passed between the two; they differ in hardware.cpu: A before, B now;"
        " steps: 10 before, 20 now; Headway's own code."
    )
    without, compiled = ({**on("A", 100.0).settings, "config": value} for value in ({}, {"train": {"compile": True}}))
    found = [on("A", 100.0).model_copy(update={"settings": settings}) for settings in (without, compiled)]
    assert other_conditions(found[:1], found[1:]) == (
        "Not only time has passed between the two; they differ in config.train.compile: none before, True now."
    )
    both = changes([on("A", 100.0), on("B", 200.0)], [on("B", 220.0), on("A", 110.0)])
    assert [row[-1] for row in both] == ["10 % faster than before"] * 2
    assert len({row[0] for row in both}) == 2 and all(row[0].startswith("ddp-w2-1m-fp32-b1-t64 [") for row in both)


def test_two_sets_are_compared_cell_by_cell() -> None:
    before = [DDP, ZERO3, result("zero1", 2, [1.0])]
    now = [
        result("ddp", 2, [109.0, 110.0, 111.0]),
        result("zero3", 2, failure=("out_of_memory", "no")),
        result("zero2", 2, [1.0]),
    ]
    verdicts = {row[0].split("-")[0]: row[-1] for row in changes(before, now)}
    assert verdicts == {
        "ddp": "10 % faster than before",
        "zero3": "succeeded before, out of memory now",
        "zero2": "only now",
        "zero1": "only before",
    }


def test_files_hold_the_figures_and_every_cell(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    communication = {"steps": 2, "total_share": 0.5, "exposed_share": 0.3, "overlapped_share": 0.2}
    cells = [
        result("ddp", 1, [100.0, 102.0]),
        result("ddp", 2, [150.0, 152.0], communication=communication, energy={"joules": 500.0, "source": "a meter"}),
        result("zero1", 2, failure=("failed", "worker 0: a | b\nand <c>")),
    ]
    for cell in cells:
        write_result(tmp_path, cell)
    files = {path.name: path.read_text() for path in write_report(tmp_path)}
    lines = {(line["strategy"], line["workers"]): line for line in csv.DictReader(io.StringIO(files["metrics.csv"]))}
    assert float(lines["ddp", "2"]["tokens_per_second"]) == 151
    assert float(lines["ddp", "2"]["scaling_efficiency"]) == pytest.approx(151 / 2 / 101)
    assert float(lines["ddp", "2"]["energy_joules_per_token"]) == 0.25
    assert float(lines["ddp", "2"]["communication_exposed_share"]) == 0.3
    assert lines["zero1", "2"]["status"] == "failed" and lines["zero1", "2"]["tokens_per_second"] == ""
    assert lines["ddp", "2"]["mfu"] == "", "unknown is empty"
    table = [line for line in files["report.md"].splitlines() if line.startswith("| zero1")]
    assert len(table) == 1 and "a \\| b and \\<c\\>" in table[0]
    assert "and &lt;c&gt;" in files["report.html"] and "&lt;last&gt;" in files["report.html"]
    assert {"throughput.svg", "efficiency.svg", "memory.svg", "step-times.svg", "communication.svg"} <= files.keys()
    assert "var(--" not in files["memory.svg"] and "src=" not in files["report.html"], "nothing to load"
    assert load_report(tmp_path, tmp_path).changes[0][-1] == "no difference that the repeats can tell"


def test_a_strategy_looks_the_same_in_all_charts_of_a_report_and_like_no_other(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    names = [name for name in STRATEGIES if name != "auto"]
    cells = [result(name, workers, [100.0, 101.0]) for name in names for workers in (1, 2)]
    cells += [result(name, workers, [100.0, 101.0], model="4m") for name in names[3:] for workers in (1, 2)]
    for cell in cells:
        write_result(tmp_path, cell)
    write_report(tmp_path)
    looks = []
    for model in ("1m", "4m"):
        (path,) = (tmp_path / "plots").glob(f"{model}-*-efficiency.svg")
        # Dash and colour of the lines in the chart and its legend, in their order.
        lines = re.findall(r'style="fill: none; (.*?stroke: #\w+); stroke-width: 2[;"]', path.read_text())
        looks.append(list(dict.fromkeys(lines)))
    assert len(looks[0]) == len(names) > 8 and looks[1] == looks[0][3:]
    page, text = (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()
    for model in ("1m", "4m"):
        title = f"Throughput ({model}, fp32, micro-batches of 1 x 64 tokens, weak scaling)"
        assert f"<h2>{title}</h2>" in page and f"### {title}" in text


def test_figures_need_no_library_for_plots_and_plots_of_an_earlier_report_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_result(tmp_path, DDP)
    (tmp_path / "plots").mkdir()
    for name in ("4m-fp32-b1-t64-weak-00000000-throughput.svg", "mine.svg"):
        (tmp_path / "plots" / name).touch()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(ConfigError, match="matplotlib"):
            write_report(tmp_path)
    assert (tmp_path / "metrics.csv").read_text().count("\n") == 2 and not (tmp_path / "report.md").exists()
    pytest.importorskip("matplotlib")
    assert all(path.exists() for path in write_report(tmp_path))
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert names == {"mine.svg", "throughput.svg", "memory.svg", "step-times.svg"}


def test_a_folder_without_results_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no benchmark results"):
        load_report(tmp_path)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"mean_loss": None}, "its loss is not finite"),
        ({"skipped_steps": 1}, "3 of 6 measured steps made no update"),
    ],
)
def test_cells_that_do_not_train_are_compared_with_nothing(tmp_path: Path, more: dict[str, int], said: str) -> None:
    bad = result("zero1", 2, [499.0, 500.0, 501.0], **more)
    told = findings([DDP, bad, ZERO3])
    assert told[0] == f"Warning: zero1-w2-1m-fp32-b1-t64 is compared with nothing: {said}."
    assert not [text for text in told[1:] if "zero1" in text] and "Fastest on 2 workers: ddp" in told[1]
    one = result("zero1", 1, [10.0])
    assert efficiency(bad, [one, bad]) is None
    assert changes([DDP, one], [bad.model_copy(update={"cell": DDP.cell})])[0][-1] == f"not compared: {said}"
    write_result(tmp_path, bad)
    assert load_report(tmp_path).table[1][0][1] == f"ok; {said}"


def test_results_whose_config_has_empty_sections_and_unknown_strategies_are_reported(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    def found(name: str, config: dict[str, object], workers: int = 2):  # type: ignore[no-untyped-def]
        one = result(name, workers, [1.0, 2.0])
        return one.model_copy(update={"settings": {**one.settings, "config": config}})

    chosen, not_chosen = {"parallel": {"deepspeed_config": "own.json"}}, {"parallel": None}
    for configs, warns in (([chosen], 0), ([chosen, not_chosen], 1), ([not_chosen], 1)):
        said = findings([found("deepspeed_zero2", config, n) for n, config in enumerate(configs, 1)])
        assert len([text for text in said if "buckets of 500 million" in text]) == warns
    for one in (DDP, found("of_tomorrow", {})):
        write_result(tmp_path, one)
    assert "of_tomorrow" in write_report(tmp_path)[-1].read_text() + (tmp_path / "report.md").read_text()
