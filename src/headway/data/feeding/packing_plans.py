"""Plans of packed rows, cached on disk next to the tokens, so that only the first start has to make them.

A plan is derived data in `<store>/packing/<T>-<packing>/<split>/<source>/<key>/`. Its files `starts.bin` (little-endian
uint64), `lengths.bin` (uint32), `rows.bin` (uint64) and `continued.bin` (a byte each, 0 or 1) hold the arrays of
`packing.Plan`; `plan.json` holds the figures. `concat` has `plan.json` alone, and where rows without a target are left
out, a plan of the others in `<T>-trained`. The key is a hash of everything that
determines the plan, so a plan of other tokens is never mistaken for it. One rename publishes the folder. It may be
removed at any time.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headway.core.arrays import Bools, Ints, UInt64s
from headway.core.console import notice, progress
from headway.core.files.atomic import sync_folder, write_json
from headway.core.files.foreign import read_json_object
from headway.core.files.hashes import fingerprint
from headway.core.files.locks import locked_folder
from headway.core.files.paths import user_cache
from headway.core.process.faults import fault_point
from headway.data.feeding.packing import (
    HasTarget,
    Packing,
    PackingFigures,
    Plan,
    concat_figures,
    plan_rows,
    plan_trained_rows,
)
from headway.data.store import PACKING, TokenStore

#: Version of the packing rules and of the files; a change of it makes all plans again.
_VERSION = 2
_FIGURES = "plan.json"
_FILES = {"starts": "<u8", "lengths": "<u4", "rows": "<u8", "continued": "|b1"}
#: Tokens whose mask is read at once, a byte each.
_MASK_TOKENS = 2**24
_ABANDONED_SECONDS = 24 * 3600
# The user's cache does not record which stores still exist, so plans there expire.
_UNUSED_SECONDS = 30 * 24 * 3600


def open_plan(
    store: TokenStore, split: str, source: str, sequence_length: int, packing: Packing | Literal["trained"]
) -> tuple[Plan, PackingFigures]:
    """Open the plan of one source: map it into memory if it exists, else make and cache it.

    The packing `trained` is that of the rows of `concat` with a trained target.

    If the store is not writable, the plan goes to the user's cache (`$XDG_CACHE_HOME/headway/packing`). If that is not
    writable either, the plan stays in memory. A notice says so.
    """
    relative = _relative_folder(store, split, source, sequence_length, packing)
    roots = [store.path / PACKING, user_cache() / PACKING]
    for root in roots:
        found = _read(root / relative)
        if found is not None:
            _mark_used(root / relative, store)
            return found
    job = _Job(store, split, source, sequence_length, packing)
    reasons = []
    for root in roots:
        try:
            made = _make_once(root / relative, job)
        except OSError as error:
            reasons.append(f"{root}: {error.strerror or error}")
            continue
        if made is not None:
            if reasons:
                notice(f"the packing of source '{source}' is kept in {root}, since {reasons[0]}")
            _tidy(root, relative, store)
            return made
        reasons.append(f"{root}: what was written cannot be read")
    notice(f"the packing of source '{source}' is in memory and made again at each start, since {'; '.join(reasons)}")
    return _make_in_memory(job)


def open_figures(store: TokenStore, split: str, source: str, sequence_length: int) -> PackingFigures:
    """Return the figures of `concat`, which has no plan: read them if they exist, else count and cache them."""
    relative = _relative_folder(store, split, source, sequence_length, "concat")
    roots = [store.path / PACKING, user_cache() / PACKING]
    for root in roots:
        with suppress(OSError, ValueError, KeyError, TypeError):
            figures = PackingFigures.from_json(read_json_object(root / relative / _FIGURES))
            _mark_used(root / relative, store)
            return figures
    shards = store.shards(split, source)
    with progress(f"counting documents of {source}", sum(shard.documents for shard in shards), "documents") as bar:

        def parts() -> Iterator[UInt64s]:
            for number, shard in enumerate(shards):
                yield store.shard_documents(split, source, number)
                bar.advance(shard.documents)

        figures = concat_figures(parts(), store.tokens(split, source), sequence_length)
    for root in roots:
        folder = root / relative
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / _FIGURES, figures.to_json(), exact=True)
            _tidy(root, relative, store)
            break
    return figures


def _relative_folder(store: TokenStore, split: str, source: str, sequence_length: int, packing: str) -> Path:
    """Return the plan's folder below `packing/`; its last part is a hash of everything that determines the content."""
    part = store.manifest["splits"][split][source]
    key = fingerprint({"version": _VERSION, "length": sequence_length, "packing": packing, "part": part})[:24]
    return Path(f"{sequence_length}-{packing}", split, source, key)


def _read(folder: Path) -> tuple[Plan, PackingFigures] | None:
    """Read the plan in a folder; return None if there is none or if it is damaged."""
    try:
        figures = PackingFigures.from_json(read_json_object(folder / _FIGURES))
        sizes = {**dict.fromkeys(_FILES, figures.pieces), "rows": figures.rows + 1}
        arrays = {name: _map(folder / f"{name}.bin", dtype, sizes[name]) for name, dtype in _FILES.items()}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if arrays["rows"][-1] != figures.pieces:
        return None
    return Plan(**arrays), figures


def _map(file: Path, dtype: str, count: int) -> NDArray[Any]:
    if file.stat().st_size != count * np.dtype(dtype).itemsize:
        raise ValueError(f"{file} has another length")
    # Return a plain array: indexing a memmap costs several times as much.
    return np.asarray(np.memmap(file, dtype=dtype, mode="r", shape=(count,))) if count else np.empty(0, dtype=dtype)


@dataclass(frozen=True)
class _Job:
    """A plan to make."""

    store: TokenStore
    split: str
    source: str
    sequence_length: int
    packing: Packing | Literal["trained"]

    def blocks(self) -> Iterator[tuple[Plan, PackingFigures]]:
        """Plan the rows block by block, and show the progress."""
        leaves_out = self.store.leaves_out_rows(self.split, self.source)
        has_target = _targets_of(self.store, self.split, self.source) if leaves_out else None
        if self.packing == "trained":
            assert has_target is not None, "only where rows are left out"
            yield from plan_trained_rows(self.store.tokens(self.split, self.source), self.sequence_length, has_target)
            return
        shards = self.store.shards(self.split, self.source)
        bounds = (self.store.shard_documents(self.split, self.source, number) for number in range(len(shards)))
        with progress(f"packing {self.source}", sum(shard.documents for shard in shards), "documents") as bar:
            for plan, figures in plan_rows(bounds, self.sequence_length, self.packing, has_target):
                yield plan, figures
                bar.advance(figures.documents)


def _targets_of(store: TokenStore, split: str, source: str) -> HasTarget:
    """Return what tells whether pieces of a source have a trained token after their first, by its loss mask."""

    def has_target(starts: Ints, lengths: Ints) -> Bools:
        found = np.zeros(len(starts), dtype=np.bool_)
        place = 0
        while place < len(starts):  # which are ascending
            first = int(starts[place])
            after = max(place + 1, int(np.searchsorted(starts, first + _MASK_TOKENS)))
            inside = slice(place, after)
            ends = starts[inside] + lengths[inside] - first
            mask = store.read_mask(split, source, first, int(ends.max()))
            assert mask is not None
            before = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
            found[inside] = before[ends] > before[starts[inside] - first + 1]
            place = after
        return found

    return has_target


def _make_once(folder: Path, job: _Job) -> tuple[Plan, PackingFigures] | None:
    """Make the plan in `folder`, one process at a time; return None if it cannot be read there afterwards."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked_folder(folder.parent):  # where folders cannot be locked (NFS), every process makes its own plan
        made = _read(folder)  # another process may have made it meanwhile
        if made is None:
            _write(folder, job)
            made = _read(folder)
        return made


def _write(folder: Path, job: _Job) -> None:
    """Make the plan block by block in a temporary folder next to `folder`, then rename it into place."""
    temporary = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
    total = PackingFigures()
    try:
        with ExitStack() as opened:
            files = {name: opened.enter_context((temporary / f"{name}.bin").open("wb")) for name in _FILES}
            for arrays in _arrays(job, total):
                for name, array in arrays.items():
                    files[name].write(array.tobytes())
                fault_point("packing.block")
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
        write_json(temporary / _FIGURES, total.to_json(), exact=True)
        temporary.chmod(0o755)  # mkdtemp makes it private to its owner, but a store may have several users
        _publish(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _publish(temporary: Path, folder: Path) -> None:
    if _read(folder) is not None:  # another worker was faster; its bytes are identical
        return
    shutil.rmtree(folder, ignore_errors=True)  # damaged
    try:
        temporary.rename(folder)
    except OSError:
        if _read(folder) is None:
            raise
    sync_folder(folder.parent)


def _mark_used(folder: Path, store: TokenStore) -> None:
    if not folder.is_relative_to(store.path):
        with suppress(OSError):
            os.utime(folder)


def _tidy(root: Path, relative: Path, store: TokenStore) -> None:
    """Remove plans that no one needs, after one was added to the store's folder or to the user's cache.

    In a store these are plans of tokens that no longer exist, and unfinished ones of killed processes. In the cache
    these are plans that have not been opened for long: each new version of a store leaves one behind.
    """
    is_shared = root != store.path / PACKING
    if store.is_part and not is_shared:  # the other plans belong to parts that are in use
        return
    others = root.glob("*/*/*/*") if is_shared else (root / relative).parent.iterdir()  # see `_relative_folder`
    for folder in others:
        with suppress(OSError):
            seconds = time.time() - folder.stat().st_mtime
            if is_shared:
                is_needed = seconds <= _UNUSED_SECONDS
            else:
                is_unfinished = folder.name.startswith(".making-")
                is_needed = folder == root / relative or (is_unfinished and seconds <= _ABANDONED_SECONDS)
            if not is_needed:
                shutil.rmtree(folder, ignore_errors=True)


def _make_in_memory(job: _Job) -> tuple[Plan, PackingFigures]:
    total = PackingFigures()
    blocks = list(_arrays(job, total))
    return Plan(**{name: np.concatenate([block[name] for block in blocks]) for name in _FILES}), total


def _arrays(job: _Job, total: PackingFigures) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield the arrays of a plan part by part, and add up its figures in `total`."""
    empty = {name: np.empty(0, dtype=dtype) for name, dtype in _FILES.items()}
    yield {**empty, "rows": np.zeros(1, dtype=_FILES["rows"])}
    for plan, figures in job.blocks():
        block = {**vars(plan), "rows": plan.rows[1:] + np.uint64(total.pieces)}
        total.add(figures)
        yield {name: block[name].astype(dtype, copy=False) for name, dtype in _FILES.items()}
