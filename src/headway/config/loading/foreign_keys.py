"""Keys of other trainers, each with one sentence on what Headway has in its place: the table is `foreign_keys.yaml`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from headway.config.loading.document import parse


def sentences() -> dict[str, str]:
    """Return the sentence on each name elsewhere."""
    return {name: sentence for name, (_, sentence) in _table().items()}


def our_names() -> dict[str, str]:
    """Return the key here for each name elsewhere that has one."""
    return {name: key for name, (key, _) in _table().items() if key is not None}


@cache
def _table() -> dict[str, tuple[str | None, str]]:
    file = Path(__file__).with_suffix(".yaml")
    rows = parse(file.read_text(encoding="utf-8"), file.name).plain()
    return {name: (row["key"], row["sentence"]) for row in rows for name in row["names"].split()}
