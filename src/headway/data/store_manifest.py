"""Reading and validation of a token store's manifest, before anything relies on it.

A manifest may come from an untrusted party, when a store is copied or read from a URL. Its names become paths, and its
counts become lengths of files and arrays. So each is checked once, when the manifest is read.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from headway.core.errors import DataError
from headway.core.files.foreign import LISTING_BYTES, parse_json, read_bytes
from headway.core.format import printable
from headway.core.user_command import suggest

FORMAT = "headway-token-store"
VERSION = 2
MANIFEST = "manifest.json"
#: Upper limit of a store's tokens: 2^53 of them take 18 petabytes.
MOST_TOKENS = 2**53

_WIDTHS = {"uint16": 2**16, "uint32": 2**32}
_LONGEST_NAME = 255
_PLAIN_NAME = re.compile(r"[^./\\\0][^/\\\0]*")


def _single_component(name: str) -> str:
    """Check that a name is a single path component that is not hidden."""
    if not _PLAIN_NAME.fullmatch(name) or len(name.encode()) > _LONGEST_NAME:
        raise ValueError("it is not a valid name of a file or folder")
    return name


_Name = Annotated[str, AfterValidator(_single_component)]
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Count = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
_Positive = Annotated[int, Field(ge=1, le=MOST_TOKENS)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True)


class _Shard(_Part):
    model_config = ConfigDict(extra="forbid")

    file: Annotated[_Name, Field(pattern=r"\.bin$")]
    tokens: _Positive
    documents: _Positive
    sha256: _Sha256
    index_sha256: _Sha256
    mask_sha256: _Sha256 = ""


class _SourceInSplit(_Part):
    tokens: _Count
    documents: _Count
    shards: list[_Shard]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len({shard.file for shard in self.shards}) < len(self.shards):
            raise ValueError("two of its shards have the same file")
        if len({bool(shard.mask_sha256) for shard in self.shards}) > 1:
            raise ValueError("only some of its shards have a loss mask")
        for shard in self.shards:
            if shard.documents > shard.tokens:
                raise ValueError(f"{shard.file} has more documents than tokens")
        for key in ("tokens", "documents"):
            total = sum([getattr(shard, key) for shard in self.shards])
            if getattr(self, key) != total:
                raise ValueError(f"{key} is {getattr(self, key):,}, but its shards have {total:,}")
        return self


class _Source(_Part):
    model_config = ConfigDict(extra="allow")

    name: _Name
    tokens: _Count
    documents: _Count

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key, value in (self.model_extra or {}).items():
            if type(value) is int and not 0 <= value < 2**63:
                raise ValueError(f"{key} is {value}, but must be 0 to 2^63")
        return self


class _Tokenizer(_Part):
    fingerprint: _Sha256
    vocab_size: Annotated[int, Field(ge=1, le=2**32)]
    end_of_text: str
    end_of_text_id: int
    begin_of_text: list[str] = []
    begin_of_text_ids: list[int] = []

    @model_validator(mode="after")
    def _check(self) -> Self:
        for number in (self.end_of_text_id, *self.begin_of_text_ids):
            if not 0 <= number < self.vocab_size:
                raise ValueError(f"an id is {number:,}, but must be 0 to {self.vocab_size - 1:,}")
        if len(self.begin_of_text) != len(self.begin_of_text_ids):
            raise ValueError("begin_of_text_ids are not the ids of its begin_of_text")
        return self


class _Steps(_Part):
    steps: list[dict[str, Any]]


class _Settings(_Part):
    clean: _Steps | None = None
    source_clean: dict[str, _Steps] = {}


class _Split(_Part):
    bound: Annotated[str, Field(pattern=r"^[0-9]{1,20}$")]


class _Manifest(_Part):
    """The keys that preparation, training and inspection rely on; others are allowed."""

    dtype: Literal["uint16", "uint32"]
    tokenizer: _Tokenizer
    sources: Annotated[list[_Source], Field(min_length=1)]
    splits: dict[Literal["train", "validation"], dict[str, _SourceInSplit]]
    settings: _Settings
    split: _Split
    inputs_sha256: _Sha256 = ""
    imported: dict[str, Any] = {}

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = Counter(source.name for source in self.sources)
        for name, times in names.items():
            if times > 1:
                raise ValueError(f"two sources have the name {name!r:.60}")
        for split, parts in self.splits.items():
            for name in parts:
                if name not in names:
                    raise ValueError(f"splits.{split} has {name!r:.60}, which is not among its sources")
        total = sum(part.tokens for parts in self.splits.values() for part in parts.values())
        if total > MOST_TOKENS:
            raise ValueError(f"it has {total:,} tokens, more than a store can have")
        if self.tokenizer.vocab_size > _WIDTHS[self.dtype]:
            raise ValueError(f"{self.dtype} cannot hold the {self.tokenizer.vocab_size:,} ids of its vocabulary")
        return self


def _check(manifest: Any) -> None:
    """Check names, counts and totals of a manifest. The files are not checked.

    Raises:
        ValueError: a value is missing, has the wrong type, or is out of range; the message names its place.
    """
    try:
        _Manifest.model_validate(manifest)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "manifest"
        problem = first["msg"].removeprefix("Value error, ")
        value = first["input"]
        found = f" (found {value!r:.60})" if isinstance(value, str | int | float | None) else ""
        raise ValueError(printable(f"{place[:120]}: {problem}{found}")) from None


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of the store in folder `path`.

    Raises:
        DataError: it is missing, invalid, or has another format or version.
    """
    file = path / MANIFEST
    try:
        content = read_bytes(file, LISTING_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise DataError("there is no token store here", where=str(path), fix=suggest("data prepare")) from None
    except OSError as error:
        what = f"the manifest of the token store cannot be read: {error.strerror or error!r}"
        raise DataError(what, where=str(file), fix="check the file's permissions and the disk") from None
    return parse_manifest(content, str(file))


def parse_manifest(content: bytes, where: str) -> dict[str, Any]:
    """Parse a manifest and check its names and counts.

    Raises:
        DataError: it is invalid, or has another format or version.
    """
    try:
        manifest = parse_json(content)
        kind = manifest["format"]
        version = manifest["version"]
        if (kind, version) == (FORMAT, VERSION):
            _check(manifest)
    except (ValueError, KeyError, TypeError) as error:
        problem = error if isinstance(error, ValueError) else repr(error)
        what = f"the manifest of the token store cannot be read: {problem}"
        raise DataError(what, where=where, fix=f"restore it from a copy, or {_anew()}") from None
    if (kind, version) != (FORMAT, VERSION):
        named = printable(f"{kind} version {version}")[:100]
        raise DataError(
            f"this is a store of format {named}; this Headway reads {FORMAT} version {VERSION}",
            where=where,
            fix=_anew(),
        )
    return dict(manifest)


def _anew() -> str:
    """Return the command that replaces a store.

    Models trained on a store need its vocabulary, which cannot be trained again once the input has changed.
    """
    prepare = suggest("data prepare", "--force")
    return f"{prepare} makes it anew, with data.tokenizer.path=STORE/tokenizer for its old vocabulary"
