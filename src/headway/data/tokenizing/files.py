"""Finds a tokenizer in a file or folder, whatever its format, and turns it into the JSON of `tokenizer.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from headway.core.errors import DataError

# What a folder may hold, the first one counts.
_NAMES = ("tokenizer.json", "tokenizer.model", "*.tiktoken", "tekken.json", "*.model")
_FIX = "give a tokenizer.json, .model or .tiktoken file, or a folder with one; headway tokenizer train makes one"


@dataclass(frozen=True)
class FoundTokenizer:
    """A tokenizer as `tokenizers` reads it."""

    path: Path
    content: bytes
    """Of its tokenizer.json."""
    end_of_text: str | None
    """The token that it, or the `tokenizer_config.json` beside it, says ends a text."""


def read_tokenizer(path: Path, pattern: str | None = None) -> FoundTokenizer:
    """Read a tokenizer of any known format: see `Tokenizer.load`.

    Raises:
        DataError: there is none; or a `.tiktoken` file whose pattern or special tokens nobody has said.
    """
    path = _file_in(path) if path.is_dir() else path
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"no tokenizer can be read: {error.strerror}", where=str(path), fix=_FIX) from None
    config = _config_beside(path)
    content, end = _converted(path, data, config, pattern)
    return FoundTokenizer(path, content, _content(config.get("eos_token")) or end)


def _file_in(folder: Path) -> Path:
    """The tokenizer of a folder, or of the folder `tokenizer` in it, as a store has one."""
    for place, name in product((folder, folder / "tokenizer"), _NAMES):
        files = sorted(place.glob(name))
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise DataError(f"a folder with several tokenizers: {names}", where=str(place), fix="name one of them")
        if files:
            return files[0]
    return folder / _NAMES[0]


def _converted(path: Path, data: bytes, config: dict[str, Any], pattern: str | None) -> tuple[bytes, str | None]:
    """The tokenizer.json, and the token that ends a text where the format says so."""
    start = data[:4096].lstrip()
    if start.startswith(b"{") and b'"token_bytes"' not in start:
        return data, None
    from headway.data.tokenizing.sentencepiece_models import from_model, is_model
    from headway.data.tokenizing.tiktoken_files import from_rank_file, from_tekken, is_rank_file

    if start.startswith(b"{"):
        return from_tekken(data, str(path))
    if path.suffix != ".json" and is_rank_file(data):
        return from_rank_file(data, path, config, pattern)
    if is_model(data):
        return from_model(data, str(path))
    return data, None


def _config_beside(path: Path) -> dict[str, Any]:
    """The Hugging Face `tokenizer_config.json` beside a file; empty when there is none."""
    try:
        config = json.loads(path.with_name("tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _content(token: Any) -> str | None:
    """A token's text: configs give it plain or as an object."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
