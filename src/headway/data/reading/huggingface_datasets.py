"""Hugging Face datasets: by name through `datasets`, and folders that `save_to_disk` wrote, read as Arrow files."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any

from headway.config.data import SourceConfig
from headway.core.errors import DataError, missing_extra
from headway.data.reading.places import Place, is_remote, open_file
from headway.data.reading.records import missing_field, wanted_fields

PREFIX = "hf://"
_STATE, _SPLITS = "state.json", "dataset_dict.json"
_OFFLINE = "connect to the network; what is in the local cache can be read without it under HF_HUB_OFFLINE=1"

#: Arrow files in order, or a stream of records where files alone do not say which rows there are.
Found = Sequence[Place] | Callable[[], Iterable[Any]]


def is_named(path: str) -> bool:
    """Whether a path is a dataset's name on the Hub: not a local folder, nor a file in a repository."""
    return path.startswith(PREFIX) and not path.startswith((f"{PREFIX}/", f"{PREFIX}~", f"{PREFIX}datasets/"))


def local_path(path: str) -> str:
    """`/folder` of `hf:///folder`; other paths as they are."""
    return path.removeprefix(PREFIX) if path.startswith((f"{PREFIX}/", f"{PREFIX}~")) else path


def find_named(config: SourceConfig) -> Found:
    """A dataset by its name, from the local cache or the Hub.

    Raises:
        ConfigError: `datasets` is not installed.
        DataError: there is no such dataset, subset or split, or no network to get it.
    """
    name = config.path.removeprefix(PREFIX)
    try:
        import datasets
    except ImportError:
        raise missing_extra("datasets", "datasets", f"reading {config.path}") from None
    try:
        found = datasets.load_dataset(name, config.subset, split=config.split, streaming=config.streaming)
    except Exception as error:
        raise _load_error(config, error) from error
    present = found.column_names or []
    fields = wanted_fields(config.field, config.template)
    # `a.b` is looked for in column `a` unless there is a column of that very name.
    wanted = list(dict.fromkeys(name if name in present else name.split(".")[0] for name in fields))
    for column in wanted if present else ():
        if column not in present:
            raise missing_field(column, present, config.path)
    if not config.streaming and not any(sign in config.split for sign in "[+"):
        files = list(dict.fromkeys(entry["filename"] for entry in found.cache_files))
        if files and found._indices is None and all(Path(file).is_file() for file in files):
            return [Place(file, Path(file).name, Path(file).stat().st_size) for file in files]
    return lambda: found.select_columns(wanted) if present else found


def _load_error(config: SourceConfig, error: Exception) -> DataError:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    words = " ".join(str(error).split())[:400]
    if "DatasetNotFoundError" in kinds:
        fix = "check the name; for a private or gated dataset set HF_TOKEN"
        return DataError(f"there is no such dataset on the Hugging Face Hub: {words}", where=config.path, fix=fix)
    if kinds & {"ConnectionError", "OfflineModeIsEnabled", "ConnectError", "TimeoutError", "LocalEntryNotFoundError"}:
        what = f"the Hugging Face Hub cannot be reached, and the dataset is not in the local cache: {words}"
        return DataError(what, where=config.path, fix=f"{_OFFLINE}; or save_to_disk it elsewhere, and name that folder")
    return DataError(
        f"the dataset cannot be loaded: {words}", where=config.path, fix="check the source's path, subset and split"
    )


def find_saved(places: Sequence[Place], config: SourceConfig) -> Found | None:
    """The dataset in a folder that `save_to_disk` wrote; None when the folder is no such thing.

    Raises:
        DataError: it has no such split, or a file is missing.
    """
    by_name = {place.name: place for place in places}
    folder = ""
    if _SPLITS in by_name:
        splits = _read_json(by_name[_SPLITS]).get("splits", [])
        if config.split not in splits:
            raise DataError(
                f"the dataset has no split '{config.split}'; there are: {', '.join(splits) or 'none'}",
                where=config.path,
                fix="set the source's split",
            )
        folder = f"{config.split}/"
    if f"{folder}{_STATE}" not in by_name or f"{folder}dataset_info.json" not in by_name:
        return None
    state = _read_json(by_name[f"{folder}{_STATE}"])
    files = _listed(state.get("_data_files"), folder, by_name, config)
    indices = _listed(state.get("_indices_data_files"), folder, by_name, config)
    return (lambda: _rows_by_index(files, indices, config)) if indices else files


def _listed(entries: Any, folder: str, by_name: dict[str, Place], config: SourceConfig) -> list[Place]:
    """The files that a dataset's state names, in its order."""
    names = [f"{folder}{entry['filename']}" for entry in entries or []]
    gone = [name for name in names if name not in by_name]
    if gone:
        raise DataError(
            f"the dataset's file {gone[0]} is missing",
            where=config.path,
            fix="save the dataset again, or copy all of it",
        )
    return [by_name[name] for name in names]


def _read_json(place: Place) -> dict[str, Any]:
    try:
        with open_file(place) as stream:
            return dict(json.loads(stream.read()))
    except (ValueError, TypeError) as error:
        raise DataError(f"not a dataset's description: {error}", where=place.location, fix="save it again") from None


def _rows_by_index(files: Sequence[Place], indices: Sequence[Place], config: SourceConfig) -> Iterator[dict[str, Any]]:
    """Rows in the order of an indices mapping, as older versions of `datasets` saved shuffled and filtered datasets."""
    import pyarrow as arrow

    if is_remote(config.path):
        what = "a dataset with an indices mapping can only be read from a local disk"
        raise DataError(what, where=config.path, fix="save it again with flatten_indices(), or copy it")
    with ExitStack() as opened:

        def batches(place: Place) -> Iterator[Any]:
            return iter(arrow.ipc.open_stream(opened.enter_context(arrow.memory_map(place.location))))

        data = [batch for place in files for batch in batches(place)]
        ends = list(accumulate(batch.num_rows for batch in data))
        for numbers in (batch.column(0) for place in indices for batch in batches(place)):
            for number in numbers.to_pylist():
                part = bisect_right(ends, number)
                row = number - (ends[part - 1] if part else 0)
                yield data[part].slice(row, 1).to_pylist()[0]
