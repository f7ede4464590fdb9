"""Tables of any width, and axes whose labels are written alike."""

from __future__ import annotations

import re
from typing import Any

import pytest

from headway.telemetry import html
from headway.telemetry.curves import axis_labels
from headway.telemetry.drawing import drawing, number_ticks
from headway.text.report.page import duplicates, length_chart, share_chart


def test_cells_break_between_words_only() -> None:
    (rule,) = re.findall(r"^td \{.*", html.STYLE, re.MULTILINE)
    # `anywhere` would let a column of a wide table shrink to single letters.
    assert "overflow-wrap: break-word" in rule


def test_a_table_of_many_columns_keeps_its_first_one_in_sight_and_its_text_wide() -> None:
    headers = [f"h{number}" for number in range(8)]
    text = html.table(headers, [["a cell", "a text that is longer than any number", *"123456"]], range(2, 8))
    assert '<table class="many">' in text and '<td class="text">a text' in text and "<td>a cell</td>" in text
    assert ".many :is(th, td):first-child { position: sticky;" in html.STYLE and "td.text { min-width" in html.STYLE
    assert 'class="many"' not in html.table(headers[:3], [["a", "b", "c"]])


def test_columns_that_say_nothing_can_be_left_out() -> None:
    rows = [["n/a", "n/a", "1", ""], ["n/a", "n/a", "n/a", "n/a"]]
    text = html.table(["A", "B", "C", "D"], rows, (1, 2, 3), drop_unknown=True)
    assert re.findall(r"<th[^>]*>(\w)</th>", text) == ["A", "C"]
    assert text.count('<td class="number">1</td>') == 1 and text.count("<td>n/a</td>") == 2
    assert "<th>B</th>" in html.table(["A", "B", "C", "D"], rows)


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0, 8000, 10_000], ["0", "8k", "10k"]),
        ([6000, 8000], ["6,000", "8,000"]),
        ([0, 500_000, 1e6, 1.5e6], ["0", "0.5M", "1M", "1.5M"]),
        ([100, 1000, 10_000, 1e6], ["100", "1k", "10k", "1M"]),
        ([0, 5e-4, 1e-3, 1.5e-3], ["0", "5e-4", "1e-3", "1.5e-3"]),
        ([1e-4, 0.1, 10], ["1e-4", "1e-1", "10"]),
        ([-10_000, 1e-15, 10_000], ["-10k", "0", "10k"]),
        ([0.0, 0.5], ["0", "0.5"]),
        ([], []),
    ],
)
def test_labels_of_one_axis_are_written_alike(values: list[float], labels: list[str]) -> None:
    assert axis_labels(values) == labels


def test_ticks_beyond_the_axis_do_not_choose_its_unit() -> None:
    with drawing(300, 200) as (figure, axes):
        axes.plot([0, 1], [0, 9000])
        axes.set_ylim(0, 9500)
        axes.yaxis.set_major_formatter(number_ticks())
        axes.set_yticks([0, 8000, 10_000])
        axes.set_ylim(0, 9500)
        figure.draw_without_rendering()
        assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "8,000", ""]


def test_lengths_have_a_bar_from_end_to_end() -> None:
    plot = length_chart("source", [[4000, 5000, 10], [5000, 8000, 20]]).plot
    assert plot is not None and plot["log_x"] and plot["data"] == [[4000, 5000, 8000], [10, 20, 20]], "to its end"


def test_shares_say_what_they_are_of() -> None:
    chart = share_chart(["a", "b"], [0.5, 0.5], [0.3, 0.7])
    assert [entry.label for entry in chart.legend] == [
        "share of the train split's tokens",
        "share of training rows that the config asks for",
    ]


COUNTS = {"documents": 10, "bytes": 2048, "exact": 3, "near": 1, "emptied": 0, "removed": 4, "removed_bytes": 1024}


@pytest.mark.parametrize("near", [True, False])
def test_duplicates_are_told_in_words(near: bool) -> None:
    report: dict[str, Any] = {
        "settings": {"documents": True, "near": near, "similarity": 0.8, "ngram": 5, "max_removed": 0.5},
        "total": COUNTS,
        "sources": {"web": COUNTS, "books": COUNTS},
        "clusters": {"count": 2, "largest": [{"documents": 3, "share": 0.15}]},
    }
    text = duplicates(report)
    assert "4 (40.0 %)" in text and "1.0 KiB (50.0 %)" in text and "<th>3 (" not in text
    assert "<th>Source</th>" in text and "Equal to another" in text and "all sources" in text and "2.0 KiB" in text
    assert "<dt>Largest clusters</dt><dd>3 documents (15.0 %)</dd>" in text
    assert "Equal documents are left out</dt><dd>yes" in text
    assert ("<dt>Words in an n-gram</dt><dd>5</dd>" in text) == near, "it means nothing where nobody looks"
    assert "ngram" not in text.lower() and "_" not in text
    assert duplicates(None) == ""
