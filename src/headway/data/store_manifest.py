"""Reading and validation of a token store's manifest, before anything relies on it.

A manifest may come from an untrusted party, when a store is copied or read from a URL. Its names become paths, and its
counts become lengths of files and arrays. So each is checked once, when the manifest is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headway.core.errors import DataError
from headway.core.files.foreign import LISTING_BYTES, parse_json, read_bytes
from headway.core.format import printable
from headway.core.user_command import suggest

FORMAT = "headway-token-store"
VERSION = 2
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")
#: Upper limit of a store's tokens: 2^53 of them take 18 petabytes.
MOST_TOKENS = 2**53

_SHARD = ("file", "tokens", "documents", "sha256", "index_sha256")
_MASK = "mask_sha256"
_WIDTHS = {"uint16": 2**16, "uint32": 2**32}
_LONGEST_NAME = 255
_hexadecimal: Callable[[str], Any] = re.compile(r"[0-9a-f]{64}").fullmatch
_digits: Callable[[str], Any] = re.compile(r"[0-9]{1,20}").fullmatch
# The name is a single path component, not hidden, with the suffix of a shard.
_shard_file: Callable[[str], Any] = re.compile(r"[^./\\\0][^/\\\0]*\.bin").fullmatch


class ManifestError(ValueError):
    """A manifest is invalid; the message names the part."""


def check_manifest(manifest: Any) -> None:
    """Check names, counts and totals of a manifest of version 2. The files are not checked.

    Raises:
        ManifestError: a value is missing, has the wrong type, or is out of range.
    """
    vocabulary = _vocabulary(manifest)
    names = _sources(manifest)
    parts = _object(manifest, "splits", "")
    total = 0
    for split, sources in parts.items():
        if split not in SPLITS:
            raise ManifestError(f"splits has '{_shown(split)}', but only {' and '.join(SPLITS)} are allowed")
        for name in _object(parts, split, "splits."):
            if name not in names:
                raise ManifestError(f"splits.{split} has '{_shown(name)}', which is not among its sources")
            total += _part(_object(sources, name, f"splits.{split}."), f"splits.{split}.{name}")
    if total > MOST_TOKENS:
        raise ManifestError(f"it has {total:,} tokens, more than a store can have")
    _settings(manifest)
    if vocabulary > _WIDTHS[manifest["dtype"]]:
        raise ManifestError(f"{manifest['dtype']} cannot hold the {vocabulary:,} ids of its vocabulary")


def _vocabulary(manifest: Any) -> int:
    """Check the tokenizer and the data type, and return the size of the vocabulary."""
    if not isinstance(manifest, dict):
        raise ManifestError("it is not a JSON object")
    if manifest.get("dtype") not in _WIDTHS:
        raise ManifestError(f"dtype is {_shown(manifest.get('dtype'))}, neither uint16 nor uint32")
    tokenizer = _object(manifest, "tokenizer", "")
    _hash(tokenizer, "fingerprint", "tokenizer.")
    size = _count(tokenizer, "vocab_size", "tokenizer.", least=1, most=2**32)
    _text(tokenizer, "end_of_text", "tokenizer.")
    _count(tokenizer, "end_of_text_id", "tokenizer.", most=size - 1)
    begin = tokenizer.get("begin_of_text", [])
    ids = tokenizer.get("begin_of_text_ids", [])
    for name, values, kind in (("begin_of_text", begin, str), ("begin_of_text_ids", ids, int)):
        if not isinstance(values, list) or any(type(value) is not kind for value in values):
            raise ManifestError(f"tokenizer.{name} is not a list of {'names' if kind is str else 'ids'}")
    if len(begin) != len(ids) or any(not 0 <= number < size for number in ids):
        raise ManifestError("tokenizer.begin_of_text_ids are not ids of its begin_of_text")
    return size


def _sources(manifest: dict[str, Any]) -> set[str]:
    """Check the list of sources, and return their names."""
    sources = manifest.get("sources")
    names = set()
    if not isinstance(sources, list) or not sources:
        raise ManifestError("sources is not a list of sources")
    for number, source in enumerate(sources):
        where = f"sources[{number}]."
        if not isinstance(source, dict):
            raise ManifestError(f"sources[{number}] is not an object")
        name = _text(source, "name", where)
        if not is_folder_name(name):
            raise ManifestError(f"{where}name is '{_shown(name)}', which is not a valid folder name")
        if name in names:
            raise ManifestError(f"two sources have the name '{_shown(name)}'")
        names.add(name)
        for key in ("tokens", "documents"):
            _count(source, key, where)
        for key, value in source.items():
            if type(value) is int:
                _count(source, key, where, most=2**63 - 1)
    return names


def is_folder_name(name: str) -> bool:
    """Return whether a name is a single path component that is not hidden."""
    is_one_part = not name.startswith(".") and not any(sign in name for sign in "/\\\0")
    return bool(name) and is_one_part and len(name.encode("utf-8", "surrogatepass")) <= _LONGEST_NAME


def _part(part: dict[str, Any], where: str) -> int:
    """Check the entry of a source in a split, and return its tokens."""
    shards = part.get("shards")
    if not isinstance(shards, list):
        raise ManifestError(f"{where}.shards is not a list of shards")
    files = set()
    tokens = 0
    documents = 0
    masks = 0
    for number, shard in enumerate(shards):
        # A fast check for the common case: a store may have tens of thousands of shards.
        if not _is_shard(shard):
            _raise_shard_error(shard, f"{where}.shards[{number}]")
        files.add(shard["file"])
        tokens += shard["tokens"]
        masks += _MASK in shard
        documents += shard["documents"]
    if len(files) != len(shards):
        raise ManifestError(f"{where}.shards names a file twice")
    if masks not in (0, len(shards)):
        raise ManifestError(f"{where}.shards has {masks:,} loss masks for {len(shards):,} shards")
    for key, total in (("tokens", tokens), ("documents", documents)):
        if _count(part, key, f"{where}.") != total:
            raise ManifestError(f"{where}.{key} is {part[key]:,}, but its shards have {total:,}")
    return tokens


def _is_shard(shard: Any) -> bool:
    if type(shard) is not dict or len(shard) != len(_SHARD) + (_MASK in shard):
        return False
    try:
        tokens = shard["tokens"]
        documents = shard["documents"]
        file = shard["file"]
        return bool(
            type(tokens) is type(documents) is int
            and 0 < documents <= tokens <= MOST_TOKENS
            and _shard_file(file)
            and len(file.encode("utf-8", "surrogatepass")) <= _LONGEST_NAME
            and _hexadecimal(shard["sha256"])
            and _hexadecimal(shard["index_sha256"])
            and (_MASK not in shard or _hexadecimal(shard[_MASK]))
        )
    except (KeyError, TypeError):
        return False


def _raise_shard_error(shard: Any, where: str) -> None:
    """Raise the error that says what is wrong with a shard entry.

    Raises:
        ManifestError: always.
    """
    if not isinstance(shard, dict):
        raise ManifestError(f"{where} is not an object")
    file = _text(shard, "file", f"{where}.")
    if not _shard_file(file) or len(file.encode("utf-8", "surrogatepass")) > _LONGEST_NAME:
        raise ManifestError(f"{where}.file is '{_shown(file)}', which is not a valid name of a shard file")
    tokens = _count(shard, "tokens", f"{where}.", least=1)
    _count(shard, "documents", f"{where}.", least=1, most=tokens)
    for key in ("sha256", "index_sha256"):
        _hash(shard, key, f"{where}.")
    if _MASK in shard:
        _hash(shard, _MASK, f"{where}.")
    other = next(key for key in shard if key not in (*_SHARD, _MASK))
    raise ManifestError(f"{where} has the unknown key '{_shown(other)}'")


def _settings(manifest: dict[str, Any]) -> None:
    """Check the remaining values that preparation and inspection read."""
    settings = _object(manifest, "settings", "")
    split = _object(manifest, "split", "")
    bound = split.get("bound")
    if not isinstance(bound, str) or not _digits(bound):
        raise ManifestError("split.bound is not a decimal number")
    cleaned = {"clean": settings["clean"]} if settings.get("clean") is not None else {}
    if "source_clean" in settings:
        own = _object(settings, "source_clean", "settings.")
        cleaned |= {f"source_clean.{_shown(name)}": steps for name, steps in own.items()}
    for name, clean in cleaned.items():
        steps = clean.get("steps") if isinstance(clean, dict) else None
        if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
            raise ManifestError(f"settings.{name} has no list of steps")
    if "inputs_sha256" in manifest:
        _hash(manifest, "inputs_sha256", "")
    if "imported" in manifest:
        _object(manifest, "imported", "")


def _object(values: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    value = values.get(key)
    if not isinstance(value, dict):
        raise ManifestError(f"{where}{_shown(key)} is {_what(values, key)}, not an object")
    return value


def _text(values: Mapping[str, Any], key: str, where: str) -> str:
    value = values.get(key)
    if not isinstance(value, str):
        raise ManifestError(f"{where}{key} is {_what(values, key)}, not text")
    return value


def _hash(values: Mapping[str, Any], key: str, where: str) -> None:
    if not _hexadecimal(_text(values, key, where)):
        raise ManifestError(f"{where}{key} is not a SHA-256 in hexadecimal")


def _count(values: Mapping[str, Any], key: str, where: str, *, least: int = 0, most: int = MOST_TOKENS) -> int:
    value = values.get(key)
    if type(value) is not int:
        raise ManifestError(f"{where}{key} is {_what(values, key)}, not a whole number")
    if not least <= value <= most:
        raise ManifestError(f"{where}{key} is {_shown(value)}, but must be {least:,} to {most:,}")
    return value


def _what(values: Mapping[str, Any], key: str) -> str:
    return _shown(values[key]) if key in values else "missing"


def _shown(value: Any) -> str:
    """Format an untrusted value for a message."""
    text = (
        value if isinstance(value, str) else repr(value) if isinstance(value, int | float | None) else "something else"
    )
    return printable(text) if len(text) <= 60 else f"{printable(text[:60])}..."


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
            check_manifest(manifest)
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
