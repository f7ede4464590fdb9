"""docs/parallelism-traps.md names tests; each of them exists."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "parallelism-traps.md"
PREFIXES = {"D": "distributed/test_distributed_", "U": "unit/", "": ""}


def test_every_test_that_the_page_names_is_there() -> None:
    rows = [line.rsplit("|", 2)[-2] for line in PAGE.read_text().splitlines() if line.startswith("| ")][2:]
    rows = [row for row in rows if row.strip()]  # headings of parts have no test
    assert len(rows) > 25
    for row in rows:
        named = re.findall(r"([DU]?)`([\w/]*)(?:\.py)?(?:::(test_\w+))?`", row)
        assert named, row
        text = ""
        for prefix, path, test in named:
            if path:
                text = (TESTS / f"{PREFIXES[prefix]}{path}.py").read_text()
            assert not test or f"def {test}(" in text, (path, test)
