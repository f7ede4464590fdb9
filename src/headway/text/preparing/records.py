"""Records of every unit: the outcome of its survey and its shards, stored with the token store by content key.

So only new or changed units are processed, and a preparation that was killed resumes where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from headway.config.sections.data import MAX_DOCUMENT_BYTES
from headway.core.files.atomic import atomic_write, write_json
from headway.core.files.foreign import LISTING_BYTES, read_json_or_empty, readable_json_object
from headway.core.files.hashes import fingerprint
from headway.core.files.paths import link_or_copy
from headway.core.statistics import add_counts
from headway.data.shards import TOKENS, files_of, shard_files
from headway.data.store import file_problem
from headway.text.clean import CleanCounts
from headway.text.preparing.pieces import LISTED, EncodedCounts, PieceResult, ReadCounts

#: Folder of the store for files that only preparation needs.
WORK = ".work"
#: Patterns of finished work in a store that is being built: shards with their final names, and document fingerprints.
FINISHED = (f"*/*/[!.]*{TOKENS}", f"{WORK}/[!.]*.prints")
# Limit on the listed documents of a unit that cannot be encoded: the list stays in memory.
_LISTED = 20
# The library that encoded. It is not part of the store, whose bytes do not depend on it.
_ENCODER = f"{WORK}/encoder"


def key_of(*parts: Any) -> str:
    """Return the name of a result: the first 128 bits of the SHA-256 of all its inputs, in hexadecimal."""
    return fingerprint(parts)[:32]


def record_encoder(store: Path, encoder: str) -> None:
    """Record which encoder a store is being built with."""
    write_json(store / _ENCODER, {"encoder": encoder})


def recorded_encoder(store: Path) -> str | None:
    """Return the encoder of the preparation that made a store in its present state.

    It is None for a copy without the files that only preparation needs, for an imported store, and for a store older
    than these records.
    """
    name = read_json_or_empty(store / _ENCODER).get("encoder")
    return name if isinstance(name, str) else None


@dataclass
class Survey(ReadCounts):
    """The outcome of reading and cleaning a unit."""

    skipped_list: list[dict[str, str]] = field(default_factory=list)
    """Some skipped documents, until the survey is saved; afterwards `Records.listed` has them."""
    clean: dict[str, Any] | None = None
    """The cleaner's counts, as JSON."""
    piece_documents: list[int] = field(default_factory=list)
    """Documents read from each piece."""
    complete: bool = True
    """The unit was read to its end, not to its source's limit."""
    most: int = MAX_DOCUMENT_BYTES
    """`data.max_document_bytes` when the unit was read; before that key existed, documents had no limit."""

    def add(self, result: PieceResult) -> None:
        """Add the counts of one more piece."""
        add_counts(self, result, (count.name for count in fields(ReadCounts)))
        room = LISTED - len(self.skipped_list)
        self.skipped_list += [bad.listed for bad in result.skipped_list[:room]]
        self.piece_documents.append(result.read)
        if result.clean is not None:
            self.clean = added_counts(self.clean, result.clean.to_json())


def added_counts(earlier: dict[str, Any] | None, later: dict[str, Any]) -> dict[str, Any]:
    """Add the cleaner's counts of two parts of the input, all as JSON."""
    if earlier is None:
        return later

    total = CleanCounts.from_json(earlier)
    total.add(CleanCounts.from_json(later))
    return total.to_json()


@dataclass
class Shards(EncodedCounts):
    """The contribution of a unit to the store."""

    tokens: int = 0
    smallest: int = 2**64
    """Smallest and largest document hash: they decide whether the split bound must move."""
    largest: int = -1
    unencodable_list: list[dict[str, str]] = field(default_factory=list)
    """Some documents that the tokenizer cannot encode."""
    first_without: str | None = None
    """Place of the first document without a token."""
    splits: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Per split, the shard's entry in the manifest; a split without documents has none."""
    most: int = MAX_DOCUMENT_BYTES
    """`data.max_document_bytes` when the unit was read."""
    too_large: int = 0
    """Skipped documents that were larger."""

    def add(self, result: PieceResult) -> None:
        """Add the counts of one more piece."""
        add_counts(self, result, (count.name for count in fields(EncodedCounts)))
        self.tokens += sum(len(part.tokens) for part in result.splits.values())
        self.too_large += result.too_large
        room = _LISTED - len(self.unencodable_list)
        self.unencodable_list += [bad.listed for bad in result.unencodable_list[:room]]
        self.first_without = self.first_without or result.first_without
        self.smallest = min(self.smallest, result.smallest)
        self.largest = max(self.largest, result.largest)


def _holds_for(record: dict[str, Any], most: int) -> bool:
    """Return whether a unit's result holds when documents may have `most` bytes.

    The limit is not part of a result's key, since few units have a document that large: the other results stay valid
    when the limit is raised.
    """
    before = record.get("most", MAX_DOCUMENT_BYTES)
    return bool(before == most if record.get("too_large") else before <= most)


class Records:
    """The records of a store that is being built, and of the store that it will replace.

    Args:
        folder: The store that is being built.
        old: The present store.
        width: Bytes of a token.
        most: Maximum size of a document in bytes (`data.max_document_bytes`).
        fresh: Reuse nothing from the present store.
        hashed: Verify the hash of a shard before it is reused; otherwise only the length of its files is checked.
    """

    def __init__(
        self,
        folder: Path,
        old: Path,
        width: int,
        most: int = MAX_DOCUMENT_BYTES,
        *,
        fresh: bool = False,
        hashed: bool = False,
    ) -> None:
        self.folder = folder
        self._old = None if fresh else old
        self._present = old
        self.width = width
        self.most = most
        self._hashed = hashed
        self.used: set[str] = set()
        """Files that belong to the new store, relative to it."""
        self.reused: list[str] = []
        """Files that belong to the new store and are still in the present store only."""

    def survey(self, key: str, others: Iterable[str]) -> Survey | None:
        """Return the survey of a key, if it is recorded together with its files of the given suffixes."""
        names = [f"{WORK}/{key}.{name}" for name in ("survey.json", *others)]
        for place, record in self._found(names[0]):
            if all((place / name).exists() for name in names):
                self._use(place, names)
                return Survey(**{**record, "skipped_list": []})
        return None

    def listed(self, keys: Iterable[str]) -> Iterator[dict[str, str]]:
        """Yield the malformed documents that the surveys of some keys list."""
        for key in keys:
            record = readable_json_object(self.path_of(f"{WORK}/{key}.survey.json"), LISTING_BYTES)
            yield from record["skipped_list"] if record else ()

    def shards(self, key: str, source: str) -> Shards | None:
        """Return the shards of a key, if they are recorded and their files are complete."""
        name = f"{WORK}/{key}.shards.json"
        for place, record in self._found(name):
            if self._is_whole(place, source, record["splits"]):
                self._use(place, [name, *_files_of(source, record["splits"])])
                return Shards(**record)
        return None

    def _is_whole(self, place: Path, source: str, splits: dict[str, dict[str, Any]]) -> bool:
        """Return whether the files of shards exist and match their entries."""
        for split, entry in splits.items():
            for name, size, sha256 in files_of(f"{split}/{source}", entry, self.width):
                digest = sha256 if self._hashed else None
                if file_problem(place / name, size, digest):
                    return False
        return True

    def _found(self, name: str) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Yield a record of that name that holds, in the new store and in the present one, with its store."""
        for place in (self.folder, self._old):
            record = None if place is None else readable_json_object(place / name, LISTING_BYTES)
            if place is not None and record is not None and _holds_for(record, self.most):
                yield place, record

    def _use(self, place: Path, names: list[str]) -> None:
        self.used.update(names)
        if place != self.folder:
            self.reused += names

    def new_file(self, key: str, ending: str) -> Path:
        """Return the path for a new file that belongs to a survey, to be written before the survey itself."""
        (self.folder / WORK).mkdir(exist_ok=True)
        return self.folder / WORK / f"{key}.{ending}"

    def save_survey(self, key: str, survey: Survey, others: Iterable[str]) -> None:
        """Save a survey; `others` are the suffixes of files that belong to it."""
        survey.most = self.most
        self._save(f"{WORK}/{key}.survey.json", asdict(survey), [f"{WORK}/{key}.{ending}" for ending in others])
        survey.skipped_list = []  # the lists of many dirty units would fill the memory

    def save_shards(self, key: str, shards: Shards, source: str) -> None:
        """Save the record of shards that have been written."""
        shards.most = self.most
        self._save(f"{WORK}/{key}.shards.json", asdict(shards), _files_of(source, shards.splits))

    def _save(self, name: str, record: dict[str, Any], others: list[str]) -> None:
        with atomic_write(self.folder / name, "w") as file:
            json.dump(record, file)
        self.used.update([name, *others])

    def path_of(self, name: str) -> Path:
        """Return where a file of the new store lies now."""
        here = self.folder / name
        return here if here.exists() or self._old is None else self._old / name

    def link_present(self, names: Iterable[str]) -> None:
        """Link files of the present store that belong to no unit into the new one."""
        for name in names:
            _link(self._present / name, self.folder / name)

    def collect(self, others: Iterable[str]) -> None:
        """Link the reused files of the present store into the new one, and remove unneeded files from the new one.

        Args:
            others: Further files of the new store that stay.
        """
        for name in self.reused:
            assert self._old is not None
            _link(self._old / name, self.folder / name)
        keep = {*self.used, *others}
        for path in sorted(self.folder.rglob("*"), reverse=True):
            name = path.relative_to(self.folder).as_posix()
            if path.is_dir():
                if not any(path.iterdir()):
                    path.rmdir()
            elif name not in keep:
                path.unlink()


def _files_of(source: str, splits: dict[str, dict[str, Any]]) -> list[str]:
    """Return the files of each shard, relative to the store."""
    return [f"{split}/{source}/{name}" for split, entry in splits.items() for name in shard_files(entry)]


def _link(source: Path, target: Path) -> None:
    """Link a file to another name, or copy it where the file system has no hard links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        temporary = target.with_name(f".{target.name}.copy")
        link_or_copy(source, temporary)
        temporary.replace(target)
