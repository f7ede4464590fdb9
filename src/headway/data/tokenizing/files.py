"""Finds a tokenizer in a file or folder, whatever its format, and turns it into the JSON of `tokenizer.json`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from headway.config.sections.data import TOKENIZER_FILES
from headway.core.errors import DataError
from headway.core.files.foreign import read_bytes
from headway.core.hub import is_on_hub, or_on_hub, snapshot
from headway.data.tokenizing.sentencepiece_models import from_model, is_model
from headway.data.tokenizing.settings_files import BEGINS, TokenizerSettings, read_settings
from headway.data.tokenizing.tiktoken_files import from_rank_file, from_tekken, is_rank_file

#: Globs of the settings that may lie next to a vocabulary.
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "*.jinja")
_FIX = "give a tokenizer.json, .model or .tiktoken file, or a folder with one; headway tokenizer train makes one"


@dataclass(frozen=True)
class FoundTokenizer:
    """A tokenizer as `tokenizers` reads it."""

    path: Path
    content: bytes
    """The content of its tokenizer.json."""
    end_of_text: str | None
    """The end-of-text token that the file itself names."""
    settings: TokenizerSettings
    """The settings in the files next to it."""


def read_tokenizer(source: Path | str, pattern: str | None = None) -> FoundTokenizer:
    """Read a tokenizer of any known format; see `Tokenizer.load`.

    Raises:
        ConfigError: It is on the Hub, which cannot be reached or has no such model.
        DataError: There is none, or it is a `.tiktoken` file with an unknown pattern or unknown special tokens.
    """
    path = snapshot(source, (*TOKENIZER_FILES, *_BESIDE)) if is_on_hub(source) else Path(source)
    path = _file_in(path) if path.is_dir() else path
    try:
        data = read_bytes(path)
    except OSError as error:
        fix = f"{_FIX}{or_on_hub(source)}"
        raise DataError(f"no tokenizer can be read: {error.strerror}", where=str(path), fix=fix) from None
    return _converted(path, data, read_settings(path.parent), pattern)


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder holds a tokenizer of any known format."""
    return _file_in(folder).is_file()


def _file_in(folder: Path) -> Path:
    """Find the tokenizer of a folder, or of the folder `tokenizer` in it, which a store has."""
    for place, name in product((folder, folder / "tokenizer"), TOKENIZER_FILES):
        files = sorted(place.glob(name))
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise DataError(f"the folder has several tokenizers: {names}", where=str(place), fix="name one of them")
        if files:
            return files[0]
    return folder / TOKENIZER_FILES[0]


def _converted(path: Path, data: bytes, settings: TokenizerSettings, pattern: str | None) -> FoundTokenizer:
    start = data[:4096].lstrip()
    if start.startswith(b"{") and b'"token_bytes"' not in start:
        return FoundTokenizer(path, data, None, settings)

    settings = replace(settings, adds_begin=settings.values.get(BEGINS) is True)
    content: bytes = data
    end: str | None = None
    if start.startswith(b"{"):
        content, end = from_tekken(data, str(path))
    elif path.suffix != ".json" and is_rank_file(data):
        settings = replace(settings, special_by_default=True)
        content, end = from_rank_file(data, path, settings, pattern)
    elif is_model(data):
        content, end = from_model(data, str(path))
    return FoundTokenizer(path, content, end, settings)
