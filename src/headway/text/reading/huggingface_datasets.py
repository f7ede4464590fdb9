"""Hugging Face datasets: named ones through `datasets`, and folders written by `save_to_disk`, read as Arrow files."""

from __future__ import annotations

import errno
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

from headway.config.sections.data import SourceConfig
from headway.config.template import CHAT
from headway.core.errors import ConfigError, DataError, causes, needing, refusal
from headway.core.files.foreign import SETTINGS_BYTES, parse_json
from headway.core.format import format_bytes, printable
from headway.core.storage import credentials_fix, kind_of
from headway.text.reading.arrow_files import batches_of, open_arrow
from headway.text.reading.conversations import check_layout
from headway.text.reading.places import Place, is_remote, open_file
from headway.text.reading.records import check_fields, fields_there, missing_field, wanted_fields
from headway.text.reading.table_texts import UnsoundError, check_sound, columns_for, is_fault_of_file, sound_columns

PREFIX = "hf://"
_STATE = "state.json"
_SPLITS = "dataset_dict.json"

#: Arrow files in order, or a stream of records if the files alone do not determine the rows.
Found = Sequence[Place] | Callable[[], Iterable[Any]]
# No write permission, or no folder to write to. Failed connections have other numbers.
_DISK = {errno.EACCES, errno.ENOTDIR}
_OFFLINE = "connect to the network; what is in the local cache can be read without it under HF_HUB_OFFLINE=1"


def is_named(path: str) -> bool:
    """Return whether a path names a dataset on the Hub, not a local folder or a file in a repository."""
    return path.startswith(PREFIX) and not path.startswith((f"{PREFIX}/", f"{PREFIX}~", f"{PREFIX}datasets/"))


def local_path(path: str) -> str:
    """Return `/folder` for `hf:///folder`, and other paths unchanged."""
    return path.removeprefix(PREFIX) if path.startswith((f"{PREFIX}/", f"{PREFIX}~")) else path


def check_installed(path: str) -> None:
    """Check that `datasets` is installed, for the dataset of a path.

    Raises:
        ConfigError: it is not.
    """
    with needing("datasets", "datasets", f"reading {path}"):
        import datasets  # noqa: F401


def find_named(config: SourceConfig) -> Found:
    """Find a dataset by its name in the local cache or on the Hub.

    Raises:
        ConfigError: `datasets` is not installed, or would read a local folder of that name.
        DataError: the dataset, revision, subset or split does not exist, or the network is unavailable.
    """
    check_installed(config.path)
    import datasets

    name, _, revision = config.path.removeprefix(PREFIX).partition("@")
    if Path(name).is_dir():
        what = f"`datasets` would read the local folder {name} instead of the dataset on the Hub"
        fix = f"to read the folder, omit {PREFIX}; to read the dataset, work in another directory"
        raise ConfigError(what, where=config.path, fix=fix)
    try:
        builder = datasets.load_dataset_builder(name, config.subset, revision=revision or None)
    except Exception as error:
        raise _not_built(name, revision, config, error) from error
    if revision and type(builder).__module__.endswith(".cache") and builder.hash != revision:
        raise _other_commit(name, revision, builder.hash, config)
    try:
        if config.streaming:
            found = builder.as_streaming_dataset(split=config.split)
        else:
            builder.download_and_prepare()
            found = builder.as_dataset(split=config.split)
    except Exception as error:
        raise _not_loaded(builder, config, error) from error
    return _files_or_rows(found, config)


def _files_or_rows(found: Any, config: SourceConfig) -> Found:
    present = found.column_names or []
    fields = wanted_fields(config.field, config.text_template, present or None)
    if config.text_template == CHAT and present:
        check_layout(fields, present, config.path)
    # `a.b` means field `b` of column `a`, unless a column is named `a.b`.
    wanted = list(dict.fromkeys(name if name in present else name.split(".")[0] for name in fields))
    for column in wanted if present else ():
        if column not in present:
            raise missing_field(column, present, config.path)
    if not config.streaming and not any(sign in config.split for sign in "[+"):
        files = list(dict.fromkeys(entry["filename"] for entry in found.cache_files))
        if files and found._indices is None and all(Path(file).is_file() for file in files):
            # Without the number of files in the names, one more file does not rename all others.
            names = [re.sub(r"-(\d{5})-of-\d{5}(?=\.)", r"-\1", Path(file).name) for file in files]
            return [Place(file, name, Path(file).stat().st_size) for file, name in zip(files, names, strict=True)]
    return lambda: _rows(found.select_columns(wanted) if present else found, config)


def _rows(found: Iterable[Any], config: SourceConfig) -> Iterator[Any]:
    try:
        _check_maps(found)
        yield from found
    except Exception as error:
        raise hub_error(config, error, begun=True) from error


def _check_maps(found: Any) -> None:
    """Check the tables of a dataset. They are mapped into memory, and an invalid offset would crash the process.

    Raises:
        UnsoundError: a file in the cache is damaged.
    """
    for table in (getattr(found, "_data", None), getattr(found, "_indices", None)):
        for column in table.table.columns if table is not None else ():
            for number, chunk in enumerate(column.chunks):
                try:
                    check_sound(chunk)
                except ValueError as error:
                    raise UnsoundError(f"record batch {number:,} of it is damaged: {error}") from None


def _not_built(name: str, revision: str, config: SourceConfig, error: Exception) -> DataError:
    """Return the error for a dataset, revision or subset that does not exist; it lists the existing ones."""
    from datasets import get_dataset_config_names

    fallback = hub_error(config, error)
    with suppress(Exception):
        if revision and str(error).startswith("Revision"):
            return lacking("revision", revision, _revisions(name), config.path)
        if isinstance(error, ValueError) and "cache" not in str(error):
            subsets = get_dataset_config_names(name, revision=revision or None)
            if config.subset is None and len(subsets) > 1:
                what = f"the dataset has several subsets: {', '.join(subsets)}"
                return DataError(what, where=config.path, fix="set the source's subset to one of them")
            if config.subset is not None and config.subset not in subsets:
                return lacking("subset", config.subset, subsets, config.path)
    return fallback


def _other_commit(name: str, revision: str, cached: str, config: SourceConfig) -> DataError:
    """Return the error for a cached commit that differs from the requested one.

    Without a network, `datasets` takes the newest commit of its cache. Older versions also do so if there is no such
    revision.
    """
    with suppress(Exception):
        revisions = _revisions(name)
        if revision not in revisions and not re.fullmatch("[0-9a-f]{40}", revision):
            return lacking("revision", revision, revisions, config.path)
    what = f"the Hugging Face Hub cannot be reached, and the local cache has commit {cached} of the dataset"
    fix = f"connect to the network, or name that commit: {PREFIX}{name}@{cached}"
    return DataError(what, where=config.path, fix=fix)


def _revisions(name: str) -> list[str]:
    """Return the branches and tags of a dataset.

    Raises:
        Exception: the request to the Hub failed.
    """
    from huggingface_hub import HfApi

    refs = HfApi().list_repo_refs(name, repo_type="dataset")
    return [ref.name for ref in (*refs.branches, *refs.tags)]


def _not_loaded(builder: Any, config: SourceConfig, error: Exception) -> DataError:
    """Return the error for a split that does not exist, with the existing ones, or for a failed download."""
    fallback = hub_error(config, error, begun=True)
    if not isinstance(error, ValueError):
        return fallback
    with suppress(Exception):
        splits = list(builder.info.splits or builder.as_streaming_dataset())
        for split in (part.partition("[")[0].strip() for part in config.split.split("+")):
            if split not in splits:
                return lacking("split", split, splits, config.path)
        if config.streaming and config.split not in splits:
            what = f"'{config.split}' is a part or a sum of splits, but only whole splits can be streamed"
            fix = "leave streaming out, or set a limit; several splits can be several sources"
            return DataError(what, where=config.path, fix=fix)
    return fallback


def find_saved(places: Sequence[Place], config: SourceConfig) -> Found | None:
    """Find the dataset in a folder that `save_to_disk` wrote; return None for other folders.

    Raises:
        DataError: the split does not exist, or a file is missing.
    """
    by_name = {place.name: place for place in places}
    folder = ""
    if _SPLITS in by_name:
        splits = _read_json(by_name[_SPLITS]).get("splits", [])
        if not isinstance(splits, list) or not all(isinstance(split, str) for split in splits):
            raise _not_described(by_name[_SPLITS], "its splits are not a list of names")
        if config.split not in splits:
            raise lacking("split", config.split, splits, config.path)
        folder = f"{config.split}/"
    if f"{folder}{_STATE}" not in by_name or f"{folder}dataset_info.json" not in by_name:
        return None
    state = _read_json(by_name[f"{folder}{_STATE}"])
    files = _listed(state.get("_data_files"), folder, by_name, config)
    indices = _listed(state.get("_indices_data_files"), folder, by_name, config)
    return (lambda: _rows_by_index(files, indices, config)) if indices else files


def _listed(entries: Any, folder: str, by_name: dict[str, Place], config: SourceConfig) -> list[Place]:
    """Return the files that a dataset's state lists, in its order."""
    named = entries if isinstance(entries, list) else []
    if not all(isinstance(entry, dict) and isinstance(entry.get("filename"), str) for entry in named):
        raise _not_described(by_name[f"{folder}{_STATE}"], "its files have no names")
    names = [f"{folder}{entry['filename']}" for entry in named]
    gone = [name for name in names if name not in by_name]
    if gone:
        raise DataError(
            f"the dataset's file {printable(gone[0])} is missing",
            where=config.path,
            fix="save the dataset again, or copy all of it",
        )
    return [by_name[name] for name in names]


def _read_json(place: Place) -> dict[str, Any]:
    try:
        with open_file(place) as stream:
            content = stream.read(SETTINGS_BYTES + 1)
        if len(content) > SETTINGS_BYTES:
            raise ValueError(f"it has more than {format_bytes(SETTINGS_BYTES)}")
        found = parse_json(content)
    except ValueError as error:
        raise _not_described(place, str(error)) from None
    if not isinstance(found, dict):
        raise _not_described(place, "it is not a JSON object")
    return found


def _not_described(place: Place, problem: str) -> DataError:
    return DataError(f"not a dataset's description: {problem}", where=place.location, fix="save it again")


def _rows_by_index(files: Sequence[Place], indices: Sequence[Place], config: SourceConfig) -> Iterator[dict[str, Any]]:
    """Yield rows in the order of an indices mapping.

    Older versions of `datasets` saved shuffled and filtered datasets with such a mapping.
    """
    if is_remote(config.path):
        what = "a dataset with an indices mapping can only be read from a local disk"
        raise DataError(what, where=config.path, fix="save it again with flatten_indices(), or copy it")
    with ExitStack() as opened:
        data = [columns for place in files for columns in _columns(place, opened, config)]
        ends = list(accumulate(len(next(iter(columns.values()))) for columns in data))
        for place in indices:
            for numbers in (columns["indices"] for columns in _columns(place, opened, None)):
                for number in numbers.to_pylist():
                    if not isinstance(number, int) or not 0 <= number < (ends[-1] if ends else 0):
                        what = f"the indices mapping names row {number} of {ends[-1] if ends else 0:,}"
                        raise DataError(what, where=place.location, fix="save the dataset again")
                    part = bisect_right(ends, number)
                    row = number - (ends[part - 1] if part else 0)
                    yield {name: column[row].as_py() for name, column in data[part].items()}


def _columns(place: Place, opened: ExitStack, config: SourceConfig | None) -> Iterator[dict[str, Any]]:
    """Yield the needed columns of each record batch of a file; without a source, the column of an indices mapping.

    Raises:
        DataError: the file is damaged, or lacks a column.
    """
    _, reader = opened.enter_context(open_arrow(place))
    if config is not None:
        fields = columns_for(reader.schema, config.field, config.text_template, place.location)
    else:
        fields = ["indices"]
        check_fields(reader.schema.names, "indices", None, place.location)
    batches = batches_of(reader)
    number = 0
    while True:
        try:
            batch = next(batches, None)
            if batch is None:
                return
            columns = sound_columns(batch, fields)
        except Exception as error:
            if not is_fault_of_file(error):
                raise
            what = f"record batch {number:,} of the dataset's file is damaged: {error}"
            raise DataError(what, where=place.location, fix="save the dataset again, or copy it again") from None
        yield columns
        number += 1


def lacking(kind: str, wanted: str, present: Sequence[str], where: str) -> DataError:
    """Return the error for a subset, split or revision that a dataset lacks; it names the nearest match."""
    return DataError(
        f"the dataset has no {kind} '{wanted}'{fields_there(wanted, present)}",
        where=where,
        fix=f"set the source's {kind}" if kind != "revision" else "name one of these, or a commit, behind the @",
    )


def hub_error(config: SourceConfig, error: Exception, begun: bool = False) -> DataError:
    """Return the error for an exception that `datasets` raised.

    Args:
        config: The source.
        error: The exception. The message quotes its root cause; the other causes only add context.
        begun: Whether the dataset has been found and its files are being fetched.
    """
    chain = list(causes(error))
    words = _in_line(chain[-1])
    if any(kind.__name__ == "DatasetNotFoundError" for cause in chain for kind in type(cause).__mro__):
        return _not_found(config, _in_line(error))
    for cause in chain:
        if isinstance(cause, OSError) and (cause.errno in _DISK or refusal(cause) is not None):
            what = f"the dataset cannot be put into the local cache: {cause.strerror}"
            fix = "free space there, or set HF_HOME to a folder on another disk; or set streaming, which needs no cache"
            return DataError(what, where=str(cause.filename or config.path), fix=fix)
    if any(kind_of(cause)[0] == "credentials" for cause in chain):
        what = f"the Hugging Face Hub does not let us in: {words}"
        return DataError(what, where=config.path, fix=credentials_fix(config.path))
    # `datasets` reports some network errors only in the message.
    in_message = any(part in words for part in ("LocalEntryNotFoundError", "in the cache"))
    if in_message or any(_is_network_error(cause) for cause in chain):
        return _unreachable(config, words, begun)
    files = f"its files, as in hf://datasets/{config.path.removeprefix('hf://')}/**/*.parquet"
    if begun:
        what = f"the dataset cannot be read: {words}"
        fix = f"name {files}: then each is read by itself, and data.bad_documents: skip skips damaged ones"
    else:
        what = f"the dataset cannot be loaded: {words}"
        fix = f"check the source's path, subset and split; or name {files}"
    return DataError(what, where=config.path, fix=fix)


def _is_network_error(error: BaseException) -> bool:
    """Return whether a connection failed. The errors of decompressors do not count; they have no errno."""
    if type(error).__module__ in ("builtins", "gzip") and not isinstance(error, ConnectionError | TimeoutError):
        return isinstance(error, OSError) and error.errno is not None and kind_of(error)[0] == "unreachable"
    return kind_of(error)[0] == "unreachable"


def _unreachable(config: SourceConfig, words: str, begun: bool) -> DataError:
    if begun:
        what = f"the Hugging Face Hub no longer answers: {words}"
        fix = "run the same command again when it does; finished work is kept"
    elif "configurations in the cache" in words:
        what = f"the Hugging Face Hub cannot be reached, and the local cache has several subsets: {words}"
        fix = "set the source's subset"
    else:
        what = f"the Hugging Face Hub cannot be reached, and the dataset is not in the local cache: {words}"
        fix = f"{_OFFLINE}, each subset by itself; or save_to_disk it elsewhere, and name that folder"
    return DataError(what, where=config.path, fix=fix)


def _in_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400] or type(error).__name__


def _not_found(config: SourceConfig, words: str) -> DataError:
    if "gated" in words:
        what = f"the dataset is gated, and access is denied: {words}"
        return DataError(what, where=config.path, fix=credentials_fix(config.path))
    if words.startswith("Revision"):
        return DataError(f"there is no such revision: {words}", where=config.path, fix="check what is behind the @")
    what = "there is no such dataset on the Hugging Face Hub, or it is private"
    return DataError(what, where=config.path, fix=credentials_fix(config.path))
