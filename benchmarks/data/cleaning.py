"""Cleaning steps beside datatrove's filters: speed on one core, and where their decisions differ.

Both see the same real documents in turns in one process: readme files, licences and documentation of the installed
packages, and sources of the standard library. Needs `pip install '.[clean,language]' datatrove spacy`.

    python benchmarks/data/cleaning.py
    python benchmarks/data/cleaning.py --documents 800 --output cleaning.json --show 20

For each filter the differences are counted three times: as both are by default; with datatrove given the papers' values
(`limits`); and with its words cut at white space too (`words`). What is left then is looked at by hand (`--show`).
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import random
import re
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headway.config.sections.data import DataConfig
from headway.text.clean import Cleaner

Decide = Callable[[str], str | None]
_PROSE = (".md", ".rst", ".txt", "METADATA", "LICENSE", "COPYING", "NOTICE")


def real_documents(count: int) -> list[str]:
    """Different texts of at least 500 characters, half of them prose (as far as there is enough) and half code."""
    prose, code = [], []
    for distribution in distributions():
        files = [file for file in distribution.files or [] if str(file).endswith(_PROSE)]
        prose += [Path(str(distribution.locate_file(file))) for file in files]
    library = Path(sysconfig.get_paths()["stdlib"])
    code = [path for path in library.rglob("*.py") if "site-packages" not in path.parts and "test" not in path.parts]
    texts: dict[str, None] = {}
    for paths, wanted in ((prose, count // 2), (code, count)):
        paths = sorted(set(paths))
        random.Random(0).shuffle(paths)
        for path in paths:
            if len(texts) == wanted:
                break
            try:
                text = path.read_text("utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if 500 <= len(text) <= 200_000:
                texts[text] = None
    return list(texts)


def ours(*steps: Any) -> Decide:
    """Why the cleaner drops a text; None when it keeps it."""
    cleaner = Cleaner(DataConfig.model_validate({"clean": list(steps)}).clean)

    def decide(text: str) -> str | None:
        if cleaner.clean(text) is not None:
            return None
        dropped = [e.reason for e in cleaner.take_counts().steps[-1].examples if e.kind == "dropped"]
        # Without the figure: "mean word length 12.1 > 10".
        return re.sub(r" [0-9.,]+ [<>]=? .*", "", dropped[-1])

    def fresh(text: str) -> str | None:
        cleaner.take_counts()
        return decide(text)

    return fresh


def theirs(block: Any) -> Decide:
    """Why a datatrove filter drops a text; None when it keeps it."""
    from datatrove.data import Document

    def decide(text: str) -> str | None:
        result = block.filter(Document(text=text, id="0"))
        kept, reason = result if isinstance(result, tuple) else (result, "")
        return None if kept else str(reason)

    return decide


@dataclass
class Case:
    """One step, and what datatrove has for it."""

    name: str
    step: Any
    default: Callable[[], Any] | None = None
    limits: Callable[[], Any] | None = None
    module: str | None = None
    """Where datatrove's filter takes its words from."""
    formats: bool = False
    """It changes texts and drops none, so there are no decisions to compare."""
    extra: dict[str, Any] = field(default_factory=dict)


def cases(evaluation: Path) -> list[Case]:
    """All steps."""
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
    )
    from datatrove.pipeline.formatters import FTFYFormatter, PIIFormatter

    where = "datatrove.pipeline.filters."
    papers_c4 = {"min_num_sentences": 3, "min_words_per_line": 5}
    papers_fineweb = {"char_duplicates_ratio": 0.1, "new_line_ratio": 1e9}
    return [
        Case("unicode", {"step": "unicode", "mojibake": True}, FTFYFormatter, formats=True),
        Case("length", {"step": "length", "min_words": 20}),
        Case(
            "gopher_quality",
            "gopher_quality",
            GopherQualityFilter,
            GopherQualityFilter,
            where + "gopher_quality_filter",
        ),
        Case(
            "gopher_repetition",
            "gopher_repetition",
            GopherRepetitionFilter,
            GopherRepetitionFilter,
            where + "gopher_repetition_filter",
        ),
        Case("c4", "c4", C4QualityFilter, lambda: C4QualityFilter(**papers_c4)),
        Case(
            "fineweb",
            "fineweb",
            FineWebQualityFilter,
            lambda: FineWebQualityFilter(**papers_fineweb),
            where + "fineweb_quality_filter",
        ),
        Case("language", "language"),
        Case("pii", "pii", PIIFormatter, formats=True),
        Case("python", {"step": "python", "function": "textwrap:dedent"}),
        Case("decontaminate", {"step": "decontaminate", "sets": [str(evaluation)]}),
    ]


def seconds(work: Callable[[str], Any], texts: list[str]) -> float:
    """Wall time over all texts."""
    start = time.perf_counter()
    for text in texts:
        work(text)
    return time.perf_counter() - start


def speed(case: Case, texts: list[str], rounds: int) -> dict[str, Any]:
    """Megabytes of UTF-8 per second, the best of some rounds; datatrove has every other turn."""
    cleaner = Cleaner(DataConfig.model_validate({"clean": [case.step]}).clean)
    block = case.default() if case.default else None
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    mine, peer = [], []
    decide = None if block is None else block.format if case.formats else theirs(block)
    for _ in range(rounds):
        mine.append(seconds(cleaner.clean, texts))
        if decide is not None:
            peer.append(seconds(decide, texts))
    result = {"headway_mb_per_second": megabytes / min(mine)}
    if peer:
        result["datatrove_mb_per_second"] = megabytes / min(peer)
        result["ratio"] = min(peer) / min(mine)
    return result


def decisions(case: Case, texts: list[str], show: int) -> dict[str, Any]:
    """How often both keep, both drop, and differ."""
    assert case.default and case.limits
    mine = [ours(case.step)(text) for text in texts]
    stages: dict[str, list[str | None]] = {
        "default": [theirs(case.default())(text) for text in texts],
        "limits": [theirs(case.limits())(text) for text in texts],
    }
    if case.module:
        module = sys.modules[case.module]
        words = module.split_into_words
        module.split_into_words = lambda text, language: text.split()
        stages["words"] = [theirs(case.limits())(text) for text in texts]
        module.split_into_words = words
    result: dict[str, Any] = {"documents": len(texts), "headway_keeps": sum(reason is None for reason in mine)}
    for stage, peer in stages.items():
        pairs = list(zip(texts, mine, peer, strict=True))
        apart = [(text, a, b) for text, a, b in pairs if (a is None) != (b is None)]
        causes = Counter(f"headway: {a or 'keeps'} | datatrove: {b or 'keeps'}" for _, a, b in apart)
        result[stage] = {
            "datatrove_keeps": peer.count(None),
            "differ": len(apart),
            "causes": dict(causes.most_common()),
        }
    for text, a, b in apart[:show]:
        print(f"\n--- {case.name}: headway {a or 'keeps'}, datatrove {b or 'keeps'}\n{text[:400]}")
    return result


def main() -> None:
    """Run all comparisons and print or write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--show", type=int, default=0, help="texts on which the decisions still differ")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if missing := [name for name in ("datatrove", "spacy") if find_spec(name) is None]:
        parser.error(f"needs what it compares with: pip install {' '.join(missing)}")
    logging.disable(logging.WARNING)
    texts = real_documents(arguments.documents)
    evaluation = Path("cleaning-evaluation-set.jsonl")
    evaluation.write_text("".join(json.dumps({"text": text[:2000]}) + "\n" for text in texts[::10]), "utf-8")
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "datatrove": version("datatrove"),
        "documents": len(texts),
        "megabytes": sum(len(text.encode()) for text in texts) / 1e6,
        "steps": {},
    }
    try:
        for case in cases(evaluation):
            figures: dict[str, Any] = speed(case, texts, arguments.rounds)
            if case.limits:
                figures["decisions"] = decisions(case, texts, arguments.show)
            report["steps"][case.name] = figures
            peer = (
                f"  datatrove {figures['datatrove_mb_per_second']:6.2f}  ratio {figures['ratio']:6.1f}"
                if case.default
                else ""
            )
            apart = {k: v["differ"] for k, v in figures.get("decisions", {}).items() if isinstance(v, dict)}
            print(f"{case.name:18s} {figures['headway_mb_per_second']:7.1f} MB/s{peer}  {apart or ''}", flush=True)
    finally:
        evaluation.unlink()
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
