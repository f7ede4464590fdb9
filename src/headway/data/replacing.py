"""Whether a prepared store may be replaced by what a config says, or runs need it as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from headway.config.sections.data import DataConfig
from headway.core.errors import ConfigError, DataError
from headway.core.user_command import suggest
from headway.data.made_of import differences, only_adds, only_moves
from headway.data.store_manifest import read_manifest
from headway.data.used_by import mark_of, runs_using

if TYPE_CHECKING:
    from headway.data.store import TokenStore
    from headway.data.tokenizing.tokenizer import Tokenizer


def check_replaceable(data: DataConfig, run: Path | None, *, grows: bool = False, moves: bool = False) -> list[str]:
    """Return how the present store differs from what the config says, if it may be replaced; empty if it does not.

    Args:
        data: The config, resolved.
        run: The run directory of the config; that run may get other data.
        grows: Further sources may join a store that runs use: they keep their files and their vocabulary.
        moves: Sources may lie elsewhere, if it is found out before the end whether their text is the same.

    Raises:
        ConfigError: other runs use the present store.
    """
    try:
        manifest = read_manifest(data.store)
    except DataError:  # there is none, or it is damaged, which others report
        return []
    if "imported" in manifest or not (found := differences(data, manifest)):
        return []
    others = [path for path in runs_using(data.store) if run is None or path != run.resolve()]
    adds = bool(others) and only_adds(data, manifest)
    moved = bool(others) and only_moves(data, manifest)
    if not others or (grows and adds) or (moves and moved):
        return found
    more = f" ({len(others)} runs)" if len(others) > 1 else ""
    prepare = f", or let it grow: {suggest('data prepare')}" if adds else ""
    if moved and not moves:
        prepare = f", or, if the same text lies elsewhere now: {suggest('data prepare')}"
    raise ConfigError(
        f"the token store is not what the config says, and {others[0]}{more} uses it: {'; '.join(found)}",
        where=f"data.store: {data.store}",
        fix="set data.store to another folder to prepare one there, or go back to what this one was prepared"
        f" from{prepare}",
    )


def check_vocabulary_stays(present: TokenStore, tokenizer: Tokenizer, runs: Sequence[Path]) -> None:
    """Check that a store which runs use would keep its vocabulary: with another they could not continue.

    Args:
        present: The store.
        tokenizer: The vocabulary that it would get.
        runs: The runs.

    Raises:
        ConfigError: it would get another one.
    """
    if runs and tokenizer.fingerprint != present.tokenizer_fingerprint:
        raise ConfigError(
            f"this would give the store another vocabulary, and {runs[0]} could not continue with it",
            where=f"data.store: {present.path}",
            fix="set data.store to another folder, go back to the sources and the tokenizer that the store was"
            f" prepared with, or keep its vocabulary: data.tokenizer.path={present.tokenizer_folder}",
        )


@contextmanager
def released(store: Path, run: Path) -> Iterator[None]:
    """Take a run's mark from a store during a block that prepares the data with which the run starts over.

    If the block fails, the run uses the store as before.
    """
    mark = mark_of(store, run)
    try:
        content = mark.read_bytes()
    except OSError:
        yield
        return
    mark.unlink(missing_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):
            mark.parent.mkdir(exist_ok=True)
            mark.write_bytes(content)
        raise
