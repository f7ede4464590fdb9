"""What `headway data report` and `headway data inspect` show of a store of two weighted sources and a cleaning step."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headway.cli.application import application
from headway.data.store import TokenStore
from headway.text.inspect import describe_store

#: Words of a document of each source, and documents of the shortest kind, which the cleaning drops.
WORDS, DROPPED = {"long": (80, 40), "short": (20, 12)}, {"long": 5, "short": 3}
ASKED = {"long": 0.2, "short": 0.8}


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(application(["data"]), ["data", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def config(tmp_path: Path, jsonl: Callable[..., Path]) -> Path:
    for name, (many, few) in WORDS.items():
        texts = [" ".join([name, str(n), *["word"] * ((many if n % 3 else few) - 2)]) for n in range(60)]
        jsonl(tmp_path / f"{name}.jsonl", [*texts, *(f"stub <{name}> {n}" for n in range(DROPPED[name]))])
    sources = ", ".join(f"{{path: {name}.jsonl, weight: {10 * share:g}}}" for name, share in ASKED.items())
    (tmp_path / "run.yaml").write_text(
        f"name: shown\ndata:\n  sources: [{sources}]\n  store: store\n  validation: 0\n"
        "  tokenizer: {vocab_size: 300}\n  clean: [{step: length, min_words: 5}]\n"
        "train: {steps: 50, global_batch: 8, sequence_length: 16}\n"
    )
    run("prepare", tmp_path / "run.yaml", "--workers", "1")
    return tmp_path / "run.yaml"


def section(page: str, title: str) -> str:
    return page[page.index(f"<h2>{title}</h2>") :].partition("</section>")[0]


def rows(table: str) -> list[list[str]]:
    """The cells of a table's body."""
    return [re.findall(r"<td.*?>(.*?)</td>", row) for row in re.findall(r"<tr>(<td.*?)</tr>", table)]


def widths(picture: str, series: int) -> list[float]:
    """Widths of the bars of one series, in the order in which they are drawn."""
    bar = rf'<rect [^>]*width="([^"]*)"[^>]*style="fill: var\(--series-{series}\)"'
    return [float(width) for width in re.findall(bar, picture)]


def words_of(name: str) -> int:
    many, few = WORDS[name]
    return 40 * many + 20 * few


def test_the_report(config: Path) -> None:
    page = Path(run("report", config).strip()).read_text("utf-8")
    facts = describe_store(TokenStore.open("store"))
    tokens = {source["name"]: source["tokens"] for source in facts["sources"]}

    sources = section(page, "Sources")
    headers = re.findall(r"<th\b[^>]*>(.*?)</th>", sources)
    for (name, dropped), row in zip(DROPPED.items(), rows(sources), strict=True):
        shown = dict(zip(headers, row, strict=True))
        assert (shown["Source"], shown["Read"], shown["Kept"]) == (name, f"{60 + dropped}", "60")
        assert shown["Removed by cleaning"].startswith(f"{dropped} (")
        assert (
            shown["Tokens/word"] == f"{(tokens[name] - 60) / words_of(name):.2f}"
        )  # the ends of documents are no text

    # Of each source: what it has of the store, and what it is to have of training.
    have, asked = (widths(sources, series) for series in (0, 1))
    unit = sum(have)
    shares = [tokens[name] / sum(tokens.values()) for name in WORDS]
    assert [width / unit for width in have] == pytest.approx(shares, abs=1e-3)
    assert [width / unit for width in asked] == pytest.approx(list(ASKED.values()), abs=0.01)
    assert re.findall(r'series-(\d)\)"></i>(share of the train|share of training rows)', sources) == [
        ("0", "share of the train"),
        ("1", "share of training rows"),
    ]
    assert [name for name in re.findall(r">(\w+)</text>", sources) if name in WORDS] == list(WORDS)

    charts = re.findall(r"<figure.*?</figure>", section(page, "Document length"), re.DOTALL)
    for name, split, chart in zip(WORDS, facts["splits"], charts, strict=True):
        assert f"<h3>{name}</h3>" in chart and f'aria-label="{name}"' in chart
        counts = [count for *_, count in split["length_histogram"]]
        assert counts[0] == 20 and sum(counts) == 60
        (plot,) = re.findall(r'<script type="application/json">(.*?)</script>', chart)
        drawn = json.loads(plot)
        assert drawn["data"][1] == [*counts, counts[-1]], "each up to where the next begins"
        assert drawn["series"][0]["kind"] == "bars" and drawn["log_x"]

    cleaning = section(page, "Cleaning")
    for (name, dropped), row in zip(DROPPED.items(), rows(cleaning), strict=True):
        assert row[:4] == [
            "length",
            f"{60 + dropped}",
            "60",
            f"{dropped} ({dropped / (60 + dropped):.1%})".replace("%", " %"),
        ]
        assert row[-1] == f"few words {dropped}"
        assert cleaning.count(f"[dropped: 3 words &lt; 5]\nstub &lt;{name}&gt; ") == 3


def test_inspect(config: Path) -> None:
    shown = run("inspect", config, "--examples", "1")
    for name, dropped in DROPPED.items():
        header, row, reason, text = shown.partition(f"cleaning of {name}:\n")[2].splitlines()[:4]
        assert re.split(r"\s{2,}", header)[5:7] == ["BYTES IN", "BYTES OUT"]
        texts = [json.loads(line)["text"] for line in Path(f"{name}.jsonl").read_text().splitlines()]
        sizes = [f"{sum(map(len, part)):,}" for part in (texts, texts[:60])]
        expected: list[Any] = ["length", f"{60 + dropped}", "60", f"{dropped} ({dropped / (60 + dropped):.1%})", "0"]
        assert re.split(r"\s{2,}", row) == [*expected, *sizes, f"few words {dropped}"]
        assert (reason, text) == ("  length, dropped: 3 words < 5", f"    'stub <{name}> 0'")
