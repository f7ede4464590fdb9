"""The folder next to a store in which a new store is built, and which finally replaces it."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from headway.core.errors import DataError, explaining_os_errors
from headway.core.files.atomic import exchange, sync_folder
from headway.core.files.locks import is_at, locked_folder
from headway.core.process.faults import fault_point
from headway.data.first_use import VERIFIED
from headway.data.in_use import replacing
from headway.data.remote_cache import KEEPING
from headway.data.store import INPUTS, PACKING, REPORT, SKIPPED
from headway.data.store_manifest import MANIFEST
from headway.data.used_by import MARKS
from headway.text.preparing.pieces import SPLITS
from headway.text.preparing.records import FINISHED, WORK

# Marks a store that is about to be replaced. After the exchange of the folders, the old store has the name of the build
# folder. It must not be mistaken for finished work: `--repair` or `--force` may have replaced it.
_MARK = ".replaced"
# The store's own entries in its folder; any other entry belongs to the user. A report describes the store it was made
# of, so it does not move to the next one.
_OWN = {MANIFEST, INPUTS, SKIPPED, REPORT, "tokenizer", *SPLITS, WORK, KEEPING, PACKING, VERIFIED, MARKS, _MARK}


@contextmanager
def building(store: Path, *, resumes: bool = True) -> Iterator[Path]:
    """Open a folder next to the store to build a new store in, for this process alone.

    The work of a killed preparation is still in the folder, and a `publish` that was killed midway is completed or
    undone. The folder is removed when the block ends, unless it was published. After an error it stays if it holds
    finished work, with which the next preparation continues.

    Args:
        store: The store's place.
        resumes: The next preparation can use finished work.

    Raises:
        DataError: Another process is preparing this store, or the folder cannot be created.
    """
    if store.name in ("", ".."):
        # A rename of this folder would remove the user's working directory.
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
        if store.exists():  # the new store may be in place, with only the last step missing
            _move_user_files(folder, store)
            _remove_replaced(_replaced(store), store)
            if (store / _MARK).exists():  # it was not replaced after all
                (store / _MARK).unlink()
        if (folder / _MARK).exists():
            _clear(folder)
        try:
            yield folder
        except BaseException:
            if is_at(folder, descriptor) and not (resumes and any(any(folder.glob(pattern)) for pattern in FINISHED)):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        if is_at(folder, descriptor):  # the folder is still here, so nothing was published
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def _lock(folder: Path, descriptor: int, store: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise _busy(store) from None
    # The previous holder may have moved the folder into place between our open and our lock.
    if not is_at(folder, descriptor):
        raise _busy(store)


def _busy(store: Path) -> DataError:
    return DataError(
        "another process is preparing this store", where=str(store), fix="wait until it is done, or set data.store"
    )


def _replaced(store: Path) -> Path:
    return store.with_name(f".{store.name}.replaced")


def publish(folder: Path, store: Path, keeps_for: Collection[int] = ()) -> None:
    """Put a finished folder in the store's place; if there was a store, there is one at any moment.

    Args:
        folder: The folder.
        store: The store's place.
        keeps_for: Processes of runs whose shards are in the new folder, too.

    Raises:
        DataError: The store's place is taken by something else, or a run is reading the store.
    """
    sync_folder(folder)
    fault_point("data.publish")
    if not store.exists():
        folder.rename(store)
        sync_folder(store.parent)
        fault_point("data.published")
        return
    check_not_foreign(store)
    # So that no process takes the present store, under its new name, for a free build folder.
    with locked_folder(store, waits=False):
        with replacing(store, keeps_for):
            old = _changed_places(folder, store)
        sync_folder(store.parent)
        fault_point("data.published")
        _remove_replaced(old, store)


def _changed_places(folder: Path, store: Path) -> Path:
    """Put the new store in the old one's place, and return the new place of the old one.

    If the system cannot exchange two folders, the old one is renamed first, since a folder cannot be renamed over
    another. After a kill between the two renames, `building` moves it back.
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
    """Remove the replaced store, if it exists, and move the user's files to the new store."""
    if old.exists():
        _move_user_files(old, store)
        if _emptied(old):
            shutil.rmtree(old, ignore_errors=True)


def _clear(folder: Path) -> None:
    """Empty the build folder, in which a kill left a part of the replaced store."""
    if not _emptied(folder):
        raise DataError(
            "a store that was replaced cannot be removed", where=str(folder), fix="remove that folder; it is not needed"
        )
    (folder / _MARK).unlink()


def _emptied(old: Path) -> bool:
    """Remove everything in a replaced store except its mark, and return whether that succeeded."""
    for path in old.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != _MARK:
            with suppress(OSError):
                path.unlink()
    return all(path.name == _MARK for path in old.iterdir())


def _move_user_files(old: Path, store: Path) -> None:
    """Move the user's own files from the folder of a replaced store to that of the new one."""
    for path in old.iterdir():
        # The store's own files that a kill left incomplete begin with a dot and their final name.
        if not any(path.name == name or path.name.startswith(f".{name}.") for name in _OWN):
            path.rename(store / path.name)


def writing_store(store: Path, fix: str) -> AbstractContextManager[None]:
    """Turn an error of the system in a block that writes a store into a DataError with a fix."""
    return explaining_os_errors(DataError, "the token store cannot be written", store, fix)


def check_not_foreign(store: Path) -> None:
    """Raise a DataError if the store's place is taken by something that must not be deleted."""
    if store.exists() and not (store.is_dir() and ((store / MANIFEST).exists() or not any(store.iterdir()))):
        raise DataError(
            "the store's place is taken by something that is not a token store",
            where=str(store),
            fix="set data.store to another folder, or move that one away",
        )
