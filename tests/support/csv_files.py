"""The reader of CSV as a fresh process has it."""

from __future__ import annotations

import csv
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def default_field_limit() -> Iterator[None]:
    """Set the longest field to Python's default: reading documents raises it for the whole process."""
    before = csv.field_size_limit(131_072)
    yield
    csv.field_size_limit(before)
