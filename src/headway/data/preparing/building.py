"""The folder beside a store in which a new one is made, and which takes its place in the end."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headway.core.errors import DataError
from headway.core.faults import fault_point
from headway.core.files import exchange, is_at, sync_folder
from headway.data.first_use import VERIFIED
from headway.data.in_use import replacing
from headway.data.preparing.encode import SPLITS
from headway.data.preparing.records import FINISHED, WORK
from headway.data.remote_cache import KEEPING
from headway.data.store import INPUTS, MANIFEST, PACKING, REPORT, SKIPPED
from headway.data.used_by import MARKS

# Marks a store that is about to be replaced: once the folders have been exchanged, the old store has the name of one in
# the making, and must not be taken for finished work: it may be what `--repair` or `--force` replaced.
_MARK = ".replaced"
# What a store's folder has of its own. Anything else there is somebody's. A report is of the store that it was made of:
# the next one's counts are others.
_OWN = {MANIFEST, INPUTS, SKIPPED, REPORT, "tokenizer", *SPLITS, WORK, KEEPING, PACKING, VERIFIED, MARKS, _MARK}


@contextmanager
def building(store: Path, *, resumes: bool = True) -> Iterator[Path]:
    """A folder beside the store to build a new one in, for this process alone.

    What a killed preparation left there is still there; what a kill in the middle of `publish` left is made good.
    Unless it was published, the folder is removed when the block ends; but after an error it stays if it holds finished
    work, from which the next preparation goes on.

    Args:
        store: Its place.
        resumes: Finished work is of use to the next one.

    Raises:
        DataError: another process is preparing this store right now, or the folder cannot be made.
    """
    if store.name in ("", ".."):
        # It could not be renamed without taking the working directory away from under the user.
        raise DataError("a store needs a folder of its own", where=str(store), fix="give the folder's name")
    folder = store.with_name(f".{store.name}.preparing")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise DataError(f"cannot write here: {error.strerror}", where=str(folder), fix="set data.store") from None
    try:
        _lock(folder, descriptor, store)
        if not store.exists() and _replaced(store).exists():
            _replaced(store).rename(store)
        if store.exists():  # the new one may be in place, with only the last step missing
            _hand_on(folder, store)
            _remove_replaced(_replaced(store), store)
            if (store / _MARK).exists():  # it was not replaced after all
                (store / _MARK).unlink()
        if (folder / _MARK).exists():
            _clear(folder)
        try:
            yield folder
        except BaseException:
            if is_at(folder, descriptor) and not (resumes and _holds_work(folder)):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        if is_at(folder, descriptor):  # still here: nothing was published
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def _lock(folder: Path, descriptor: int, store: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise _busy(store) from None
    # The one before us may have moved the folder into place between our open and our lock.
    if not is_at(folder, descriptor):
        raise _busy(store)


def _busy(store: Path) -> DataError:
    return DataError(
        "another process is preparing this store", where=str(store), fix="wait until it is done, or set data.store"
    )


def _holds_work(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in FINISHED)


def _replaced(store: Path) -> Path:
    return store.with_name(f".{store.name}.replaced")


def publish(folder: Path, store: Path, keeps_for: Collection[int] = ()) -> None:
    """Put a finished folder in the store's place, in which there is a store at any moment if there was one.

    Args:
        folder: The folder.
        store: The store's place.
        keeps_for: Processes of trainings whose shards are in the folder, too.

    Raises:
        DataError: what is in the store's place is not a token store, or a training reads it.
    """
    sync_folder(folder)
    fault_point("data.publish")
    if not store.exists():
        folder.rename(store)
        sync_folder(store.parent)
        fault_point("data.published")
        return
    check_not_foreign(store)
    with _held(store):
        with replacing(store, keeps_for):
            old = _changed_places(folder, store)
        sync_folder(store.parent)
        fault_point("data.published")
        _remove_replaced(old, store)


@contextmanager
def _held(store: Path) -> Iterator[None]:
    """Hold the present store's folder: with its new name it could be taken for one that nobody builds in."""
    descriptor = os.open(store, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _changed_places(folder: Path, store: Path) -> Path:
    """Put the new store in the old one's place; returns where the old one is then.

    Where the system cannot exchange them the old one steps aside first, since no folder can be renamed over another;
    should a kill fall between the two renames, `building` puts it back.
    """
    (store / _MARK).touch()
    if exchange(folder, store):
        return folder
    old = _replaced(store)
    shutil.rmtree(old, ignore_errors=True)
    store.rename(old)
    fault_point("data.aside")
    folder.rename(store)
    return old


def _remove_replaced(old: Path, store: Path) -> None:
    """Remove the store that was replaced, if it is there, but for what is somebody else's."""
    if old.exists():
        _hand_on(old, store)
        if _emptied(old):
            shutil.rmtree(old, ignore_errors=True)


def _clear(folder: Path) -> None:
    """Make room in the folder beside the store, in which a kill has left some of the one that was replaced."""
    if not _emptied(folder):
        raise DataError(
            "a store that was replaced cannot be removed", where=str(folder), fix="remove that folder, nobody needs it"
        )
    (folder / _MARK).unlink()


def _emptied(old: Path) -> bool:
    """Remove all of a store that was replaced but its mark, which goes last; whether that went."""
    for path in old.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != _MARK:
            with suppress(OSError):
                path.unlink()
    return all(path.name == _MARK for path in old.iterdir())


def _hand_on(old: Path, store: Path) -> None:
    """What somebody else has laid into the folder of a store that was replaced moves on to the new one's."""
    for path in old.iterdir():
        # Files of ours that a kill left half written begin with a dot and the name that they would have had.
        if not any(path.name == name or path.name.startswith(f".{name}.") for name in _OWN):
            path.rename(store / path.name)


def check_not_foreign(store: Path) -> None:
    """Raise a DataError when the store's place is taken by something that must not be deleted."""
    if store.exists() and not (store.is_dir() and ((store / MANIFEST).exists() or not any(store.iterdir()))):
        raise DataError(
            "the store's place is taken by something that is no token store",
            where=str(store),
            fix="set data.store to another folder, or move that one away",
        )
