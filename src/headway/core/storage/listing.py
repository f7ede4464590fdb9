"""What a store says of its objects: names, sizes, versions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headway.core.storage.filesystem import WEB, scheme_of

# The last key is from the Hugging Face Hub: the id of the git object, which for a large file depends on its SHA-256.
_CHECKSUMS = ("ETag", "etag", "md5Hash", "crc32c", "checksum", "Content-MD5", "Digest", "blob_id")
_TIMES = ("LastModified", "Last-Modified", "last_modified", "updated", "mtime", "created")
# A commit of the Hugging Face Hub in a URL.
_COMMIT = re.compile(r"^hf://[^@]+@[0-9a-f]{40}(/|$)")


@dataclass(frozen=True)
class ObjectInfo:
    """An object as its store describes it."""

    url: str
    name: str
    """Path relative to what was listed."""
    bytes: int
    version: str | None
    """A checksum, or size and time of the last change; it changes with the content. None if the store has neither."""
    ranges: bool = True
    """Whether it can be read from any offset; some web servers do not support that."""


def version_of(info: Mapping[str, Any]) -> str | None:
    """Return the version of an object from its metadata."""
    for key in _CHECKSUMS:
        if info.get(key):
            return f"{key.lower()}:{info[key]}".replace('"', "")
    for key in _TIMES:
        if info.get(key):
            return f"{info.get('size')}:{info[key]}"
    return None


def join(url: str, name: str) -> str:
    """Return the URL or path of an object below another; the query of a web address is kept."""
    if not name:
        return url
    place, question, query = url.partition("?") if scheme_of(url) in WEB else (url, "", "")
    return f"{place.rstrip('/')}/{name}{question}{query}"


def last_part(url: str) -> str:
    """Return the last component of a URL's path."""
    path = url.split("?")[0].split("#")[0] if scheme_of(url) in WEB else url
    return path.rstrip("/").rsplit("/", 1)[-1]


def is_glob(url: str) -> bool:
    """Return whether a URL contains wildcards."""
    # A question mark begins a web address's query.
    return any(sign in url for sign in ("*[" if scheme_of(url) in WEB else "*?["))


def fixed_part(pattern: str) -> str:
    """Return the folders of a glob before its first wildcard."""
    parts = pattern.split("/")
    wild = next(number for number, part in enumerate(parts) if any(sign in part for sign in "*?["))
    return "/".join(parts[:wild])


def is_pinned(url: str) -> bool:
    """Return whether a URL names a commit of the Hugging Face Hub, whose content never changes."""
    return _COMMIT.search(url) is not None


def pin_commit(files: Any, path: str) -> str:
    """Pin a path in a repository of the Hugging Face Hub to the present commit of its revision.

    A branch may advance while its files are read. Besides, the contents of a commit can be cached: otherwise every file
    would need a new listing of its folder, and the Hub limits requests per five minutes.
    """
    from huggingface_hub import HfApi

    found = files.resolve_path(path)
    repo = getattr(found, "repo_id", None)
    if repo is None:  # a bucket, which has no commits
        return path
    api = HfApi(endpoint=files.endpoint, token=files.token)
    commit = api.repo_info(repo, revision=found.revision, repo_type=found.repo_type).sha
    kind = "" if found.repo_type == "model" else f"{found.repo_type}s/"
    return f"{kind}{repo}@{commit}/{found.path_in_repo}".rstrip("/")


def highest(there: Callable[[int], bool]) -> int:
    """Return the highest existing number, if numbers exist from 1 on without gaps; 0 if there is none."""
    low = 0
    high = 1
    while there(high):
        low = high
        high = 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if there(middle) else (low, middle)
    return low
