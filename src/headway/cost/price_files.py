"""Files of prices that a person names: what is wrong with them becomes a deliberate error."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headway.core.errors import ConfigError

#: Largest file of prices that is read.
PRICE_FILE_BYTES = 64 * 2**20


@contextmanager
def reading_prices(path: Path, fix: str) -> Iterator[None]:
    """Turn errors of reading and of decoding a file into deliberate ones."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror or error
        raise ConfigError(f"the prices cannot be read: {why}", where=str(path), fix=fix) from None


@contextmanager
def parsing_prices(lines: csv.DictReader[str], path: Path, fix: str) -> Iterator[None]:
    """Turn an error of the CSV reader into a deliberate one, with the number of the line."""
    try:
        yield
    except csv.Error as error:
        raise ConfigError(
            f"a line of the prices is broken: {error}", where=f"{path}, line {lines.line_num + 1}", fix=fix
        ) from None
