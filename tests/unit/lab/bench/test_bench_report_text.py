"""What a report says of cells that came out badly, once, or not at all, and what it makes of foreign text."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any

import pytest

from headway.core.command_line import print_table
from headway.core.errors import DataError
from headway.lab.bench.charts import setting_charts
from headway.lab.bench.comparison import HEADERS, changes, summary
from headway.lab.bench.findings import findings
from headway.lab.bench.fitting import largest_models, table
from headway.lab.bench.metrics_file import render_csv
from headway.lab.bench.report import load_report, render_markdown, write_report
from headway.lab.bench.results import CellResult, model_place, parse_result, write_result
from headway.lab.bench.statistics import difference
from headway.lab.bench.wording import failure_in_words
from headway.telemetry.markdown import in_markdown, markdown_texts
from support.bench import result

DDP = result("ddp", 2, [99.0, 100.0, 101.0])
SHARES = {"steps": 2, "total_share": 0.5, "overlapped_share": 0.2}


def _said(*cells: CellResult) -> str:
    return "\n".join(findings(cells))


def _ended_oddly(cell: CellResult) -> CellResult:
    odd = cell.repeats[0].model_copy(update={"reason": "measured, and then ended with exit code 1"})
    return cell.model_copy(update={"repeats": [odd, *cell.repeats[1:]]})


def test_nothing_is_told_of_a_cell_that_was_measured_once() -> None:
    found = difference([500.0], [100.0, 100.0])
    assert found is not None and not found.is_significant and not found.is_known
    text = _said(DDP, result("zero2", 2, [40.0]))
    assert "Fastest on 2 workers: ddp with 100 tokens/s; no comparison is possible with zero2:" in text
    assert "cannot tell" not in text and "no difference" not in text
    (row,) = changes([result("ddp", 2, [100.0])], [result("ddp", 2, [50.0])])
    assert row[-1] == "measured once, so no comparison is possible"


@pytest.mark.parametrize(
    ("key", "changed"),
    [
        ("measured.step_seconds", {"step_seconds": []}),
        ("measured.items", {"items": 0}),
        ("measured.tokens_per_second", {"tokens_per_second": 0}),
        ("measured.threads", {"threads": 0}),
    ],
)
def test_figures_that_cannot_be_are_refused(key: str, changed: dict[str, Any]) -> None:
    value = DDP.model_dump(mode="json")
    value["repeats"][0]["measured"] |= changed
    with pytest.raises(DataError, match=key):
        parse_result(value, "a.json")


def test_repeats_that_cannot_be_are_refused() -> None:
    for changed, said in (({"measured": None}, "no figures"), ({"started": 1e20}, "started")):
        value = DDP.model_dump(mode="json")
        value["repeats"][0] |= changed
        with pytest.raises(DataError, match=said):
            parse_result(value, "a.json")


def test_an_environment_that_knows_nothing_is_reported(tmp_path: Path) -> None:
    empty = {"hardware": None, "packages": None}
    write_result(tmp_path, DDP.model_copy(update={"environment": empty}))
    assert "no accelerator" in render_markdown(load_report(tmp_path), [])


def test_foreign_text_stays_text_in_every_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reason = "\x1b[31m=red*\n# [link](x) <img> `code` a_b"
    cell = result("zero1", 2, failure=("failed", reason))
    write_result(tmp_path, cell)
    text = render_markdown(load_report(tmp_path), [])
    assert r"failed: \\x1b\[31m=red\* # \[link\](x) \<img\> \`code\` a\_b" in text and "\x1b" not in text
    assert "## Plots" not in text
    print_table(["A", "B"], [["x\x1b[2J\ny", "z"]])
    assert capsys.readouterr().out.splitlines() == ["A            B", r"x\x1b[2J\ny  z"]
    assert in_markdown("# no heading") == r"\# no heading" and in_markdown("1. no list").startswith("&#8203;")


def test_a_spreadsheet_finds_no_formula_and_every_doubt() -> None:
    formula = result("zero1", 2, failure=("failed", "=HYPERLINK(1)"))
    doubtful = result("zero2", 2, [1.0, 2.0], skipped_steps=1)
    alone, wide = result("zero3", 1, [100.0, 101.0]), result("zero3", 4, [100.0, 101.0])
    lines = list(csv.DictReader(io.StringIO(render_csv([formula, doubtful, alone, wide]))))
    assert lines[0]["reason"] == "'=HYPERLINK(1)"
    assert (lines[1]["doubt"], lines[1]["skipped_steps"]) == ("2 of 4 measured steps made no update", "2")
    assert (lines[0]["repeats"], lines[0]["repeats_asked"], lines[0]["skipped_steps"]) == ("0", "1", "")
    assert (lines[2]["base_workers"], lines[3]["base_workers"]) == ("", "1")


def _efficiency_chart(*cells: CellResult) -> str:
    pytest.importorskip("matplotlib")
    return _charts(*cells)["efficiency"]


def _charts(*cells: CellResult) -> dict[str, str]:
    names = list(dict.fromkeys(cell.cell.strategy for cell in cells))
    found = setting_charts(cells, {name: place for place, name in enumerate(names)})
    return {named.name: named.chart.svg for named in found}


def test_what_the_cores_allow_is_drawn_from_the_fewest_workers_of_all() -> None:
    cells = [result("ddp", n, [100.0, 101.0], cores=1) for n in (1, 2, 4)]
    svg = _efficiency_chart(*cells, result("zero3", 4, [50.0, 51.0], cores=1))
    assert "as many cores as there are" in svg and "zero3, from 4 workers" in svg
    assert "ddp, from" not in svg


def test_charts_show_what_did_not_come_out_and_why() -> None:
    pytest.importorskip("matplotlib")
    lost = result("zero1", 2, failure=("out_of_memory", "no"))
    cells = (DDP, lost, result("zero2", 2, failure=("excluded", "no")), result("ddp", 8, failure=("killed", "x")))
    for name, svg in _charts(*cells).items():
        assert all(f">{word}<" in svg for word in ("out of memory", "left out", "killed", "not asked")), name
        assert "8 workers" in svg and "zero1" in svg, name
    doubtful = result("zero2", 2, [1.0, 2.0], mean_loss=None)
    assert ">not compared<" in _charts(DDP, doubtful)["throughput"]


def test_communication_is_drawn_of_every_cell_with_several_workers() -> None:
    pytest.importorskip("matplotlib")
    shares = {**SHARES, "exposed_share": 0.3}
    cells = [
        result("ddp", 2, [100.0], communication=shares),
        result("zero1", 2, failure=("killed", "x")),
        result("zero2", 2, [100.0]),
        result("zero3", 2, [100.0], communication=shares, mean_loss=None),
        result("ddp", 1, [100.0]),
    ]
    svg = _charts(*cells)["communication"]
    shown = (
        "ddp, 2 workers",
        "zero1, 2 workers",
        "killed",
        "zero2, 2 workers",
        "n/a",
        "zero3, 2 workers",
        "not compared",
    )
    assert all(f">{text}<" in svg for text in shown) and "ddp, 1 worker" not in svg
    assert "communication" not in _charts(*cells[1:]), "nothing is known of any"


def test_logarithmic_axes_have_labels_between_powers_of_ten() -> None:
    pytest.importorskip("matplotlib")
    svg = _charts(DDP, result("zero3", 2, [2000.0, 2001.0]))["throughput"]
    assert all(f">{text}<" in svg for text in ("200", "500", "1,000", "2,000"))


def test_numbers_of_many_columns_are_smaller() -> None:
    pytest.importorskip("matplotlib")
    few = _charts(*(result(f"s{n}", w, [10.0 + n, 11.0 + n]) for n in range(2) for w in (1, 2)))["throughput"]
    many = _charts(*(result(f"s{n}", w, [10.0 + n, 11.0 + n]) for n in range(11) for w in (1, 2, 4, 8, 16, 32)))
    sizes = [set(re.findall(r"font-size: ([\d.]+)px", svg)) for svg in (few, many["throughput"])]
    assert "9" in sizes[0] and "9" not in sizes[1], sizes


def test_workers_that_bring_nothing_are_said_to() -> None:
    cells = [result("ddp", n, [999.0, 1000.0, 1001.0]) for n in (1, 2, 4)]
    partly = [result("zero3", 1, [99.0, 101.0]), result("zero3", 2, [189.0, 191.0])]
    text = _said(*cells, *partly, result("zero3", 4, failure=("failed", "x")))
    assert "ddp is no faster on 4 workers than on one worker that the repeats can tell, 25 % of what" in text
    assert "zero3 does 1.90 times the tokens/s of one worker on 2 workers" in text


def test_what_two_names_of_one_strategy_hide_is_not_blamed_on_the_repeats() -> None:
    def cells(workers: int) -> list[CellResult]:
        speeds = {"ddp": 1000.0, "zero1": 800.0, "zero3": 700.0, "fsdp": 500.0}
        return [result(name, workers, [speed - 1, speed, speed + 1]) for name, speed in speeds.items()]

    for workers in (1, 2):
        text = _said(*cells(workers))
        assert "zero1 is slower by less than two names of one strategy differ" in text
        assert "fsdp and zero3 are two names of one strategy" in text
    assert "no difference in speed larger than that between two names of one strategy" in text


def test_communication_is_compared_like_everything_else() -> None:
    def cell(name: str, *exposed: float) -> CellResult:
        one = result(name, 2, [100.0] * len(exposed), communication={**SHARES, "exposed_share": 0.1})
        repeats = [
            repeat.model_copy(
                update={
                    "measured": repeat.measured.model_copy(
                        update={"communication": repeat.measured.communication.model_copy(update={"exposed_share": e})}
                    )
                }
            )
            for repeat, e in zip(one.repeats, exposed, strict=True)
            if repeat.measured and repeat.measured.communication
        ]
        return one.model_copy(update={"repeats": repeats})

    low = cell("ddp", 0.10, 0.11)
    assert "ddp the least with 11 %" in _said(low, cell("zero3", 0.30, 0.31))
    assert "the repeats tell no strategy from another" in _said(low, cell("zero3", 0.05, 0.30))
    once = _said(cell("ddp", 0.1), cell("zero3", 0.3))
    assert (
        "30 % of the profiled steps with zero3" in once
        and "; ddp has 10 %, but at least one of the two was measured only once" in once
    )
    assert "the least" not in once


def _memory_suite() -> list[CellResult]:
    sizes = ("117m", "350m", "1b")
    oom = "worker 0: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80 GiB."
    fit = {"ddp": 1, "zero3": 3}
    return [
        result(name, 2, [10.0, 11.0] if place < fit[name] else (), model=size,
               failure=None if place < fit[name] else ("out_of_memory", oom))
        for place, size in enumerate(sizes)
        for name in ("ddp", "zero3")
    ]  # fmt: skip


def test_the_largest_model_that_fits_is_said() -> None:
    cells = _memory_suite()
    (text,) = largest_models(cells)
    assert text == ("Largest model that fits on 2 workers: 117m with ddp; 1b, the largest asked, with zero3.")
    assert text in findings(cells)
    assert table(cells) == [
        ["ddp", "2", "117m", "350m: out of memory"],
        ["zero3", "2", "1b", "none: it was the largest asked"],
    ]
    failed = next(cell for cell in cells if cell.status != "ok")
    assert failure_in_words(failed).endswith("Tried to allocate 2.00 GiB.")
    assert not list(largest_models([cell for cell in cells if cell.status == "ok"]))


def test_models_come_by_size_and_what_settings_share_is_said_once() -> None:
    names = ["13b", "1b", "117m", "7b", "own"]
    assert sorted(names, key=model_place) == ["117m", "1b", "7b", "13b", "own"]
    said = findings([result(name, 2, [10.0, 11.0], model=model) for model in names for name in ("ddp", "zero3")])
    assert [text for text in said if not text.startswith("- ")][1:] == ["117m:", "1b:", "7b:", "13b:", "Own:"]


def test_a_comparison_says_first_what_got_worse() -> None:
    before = [DDP, result("zero1", 2, [99.0, 100.0, 101.0]), result("zero2", 2, [1.0]), result("zero3", 2, [1.0, 2.0])]
    now = [
        result("ddp", 2, [89.0, 90.0, 91.0], memory_mib=50.0),
        result("zero1", 2, failure=("out_of_memory", "no")),
        result("zero2", 2, [1.0]),
        result("zero3", 2, [1.0, 2.0]),
    ]
    assert summary(before, now) == (
        "Of 4 cells that both have, 1 no longer succeeds (zero1-w2-1m-fp32-b1-t64); 1 is slower"
        " (ddp-w2-1m-fp32-b1-t64); 1 needs less memory (ddp-w2-1m-fp32-b1-t64); 1 cannot be compared, measured once"
        " (zero2-w2-1m-fp32-b1-t64)."
    )
    assert summary(before[3:], now[3:]).endswith("none differs in a way that the repeats can tell.")
    assert len(set(HEADERS)) == len(HEADERS)


def test_processes_that_ended_badly_after_they_had_measured_are_named(tmp_path: Path) -> None:
    cell = _ended_oddly(DDP)
    assert findings([cell])[0] == ("Warning: ddp-w2-1m-fp32-b1-t64 was measured, and then ended with exit code 1.")
    write_result(tmp_path, cell)
    assert load_report(tmp_path).table[1][0][1] == "ok; measured, and then ended with exit code 1"


def test_findings_are_paragraphs_and_lists_with_one_blank_line_between() -> None:
    assert markdown_texts(["One.", "Two:", "- a", "- b", "Three."]) == [
        "One.", "", "Two:", "", "- a", "- b", "", "Three."
    ]  # fmt: skip
    assert markdown_texts(["- a", "- b"]) == ["- a", "- b"] and markdown_texts([]) == []


def test_small_things_read_well(tmp_path: Path) -> None:
    cell = result("ddp", 1, [1000.0, 1009.0, 1018.0])
    question = {**cell.settings, "description": "which one does need least?"}
    cell = cell.model_copy(update={"settings": question})
    write_result(tmp_path, cell)
    found = load_report(tmp_path)
    assert found.note == "Which one does need least? 1 of 1 cell succeeded."
    assert found.table[1][0][2] == "1,009 ± 22"
    assert "## Findings" not in render_markdown(found, []) and found.findings == []
    pytest.importorskip("matplotlib")
    for workers in (2, 4):
        write_result(tmp_path, result("ddp", workers, [1000.0, 1001.0], model="4m"))
    write_report(tmp_path)
    assert "Scaling efficiency (4m, fp32" in (tmp_path / "report.md").read_text()
