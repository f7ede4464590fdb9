"""Loading encoders ahead of their use: that takes longer than the rest of a short command's start. The fast one lets
others run meanwhile; the reference is loaded in a process of its own. Nothing heavy is imported here."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from headway.core.foreign import read_bytes
from headway.data.tokenizing.compact import short_form
from headway.data.tokenizing.reference_process import ReferenceProcess

#: Longer configs are not looked into ahead: PyYAML's C part ends the program where ten thousands of lists are nested.
_GUESS_BYTES = 8192
#: `data.tokenizer.encoder`, where `fastokens` comes first.
_PRELOADED = ("auto", "fastokens")


class _Loading(threading.Thread):
    """Loads a vocabulary that a function gives: the bytes of its `tokenizer.json`, and `compact` of them if somebody
    has made that."""

    def __init__(self, vocabulary: Callable[[], tuple[bytes, bytes | None] | None]) -> None:
        # No daemon: a command that ends with an error waits for it, since Python ends such threads at its exit in a way
        # that the library takes for a fault of its own, and aborts the process.
        super().__init__(name="headway-load-encoder")
        self._vocabulary = vocabulary
        self._is_parsed = threading.Event()
        self._content: bytes | None = None
        self._spec: Any = None
        self._library: Any = None

    def run(self) -> None:
        """Whatever goes wrong here goes wrong again, and is reported, where the vocabulary is loaded for good."""
        try:
            found = self._vocabulary()
            if found is not None:
                self._load(*found)
        except BaseException:  # a panic of the library too
            self._library = None
        finally:
            self._is_parsed.set()

    def _load(self, content: bytes, short: bytes | None) -> None:
        spec = short_form(content) if short is None else orjson.loads(short)
        self._spec, self._content = spec, content
        self._is_parsed.set()
        short = short or orjson.dumps(spec)
        import fastokens

        self._library = fastokens.Tokenizer.from_json_str(short.decode())

    @property
    def has_failed(self) -> bool:
        """Nothing was found, or not what can be read."""
        return self._is_parsed.is_set() and self._content is None

    def parsed(self, content: bytes) -> Any:
        """The JSON, once; None where it is not that of `content`."""
        self._is_parsed.wait()
        spec, self._spec = self._spec, None
        return spec if self._content == content else None

    def loaded(self, content: bytes) -> Any:
        """The library's tokenizer; None where it is not that of `content`."""
        self.join()
        return self._library if self._content == content else None


_loading: _Loading | None = None
_reference: ReferenceProcess | None = None


def begin_loading(content_of: Callable[[], bytes], encoder: str) -> None:
    """Begin to load a vocabulary that `fastokens` will probably encode with, unless one is being loaded already.

    Args:
        content_of: Gives the bytes of its `tokenizer.json`.
        encoder: `data.tokenizer.encoder`.
    """
    if encoder in _PRELOADED:
        _begin(lambda: (content_of(), None))


def _begin(vocabulary: Callable[[], tuple[bytes, bytes | None] | None]) -> None:
    global _loading
    if not _is_under_way():
        _loading = _Loading(vocabulary)
        _loading.start()


def _is_under_way() -> bool:
    return _loading is not None and not _loading.has_failed


def _made_short_beside(process: ReferenceProcess) -> tuple[bytes, bytes | None] | None:
    """What another process loads."""
    found = process.vocabulary()
    if found is None:
        return None
    content = read_bytes(found.file)
    return content, found.short if found.is_of(content) else None


def begin_loading_file(path: Path | None, encoder: str) -> None:
    """The same for `data.tokenizer.path`: a `tokenizer.json`, or a folder with one; other vocabularies have to wait."""
    file = _file_of(path)
    if file is not None:
        begin_loading(lambda: read_bytes(file), encoder)


def _file_of(path: Path | None) -> Path | None:
    """The `tokenizer.json` that a path stands for, if it does."""
    if path is None:
        return None
    file = path / "tokenizer.json" if path.is_dir() else path
    return file if file.suffix == ".json" and file.is_file() else None


def begin_loading_named(config: Path, overrides: Sequence[str]) -> None:
    """The same for the vocabulary that a config seems to name, before the config is read for good and while Python
    makes ready. A wrong guess costs time alone, since what was loaded is used for the same content only.

    Args:
        config: The YAML file; what it is based on is not looked into.
        overrides: `key.path=value` strings.
    """
    if not _is_under_way():  # otherwise the command line was looked into before it was understood
        path, encoder = _named(config, overrides)
        begin_loading_file(path, encoder)


def _named(config: Path, overrides: Sequence[str]) -> tuple[Path | None, str]:
    """`data.tokenizer.path` and `encoder` of a config, as far as that can be seen."""
    try:
        import yaml

        # An anchor (&name) is what a few lines need to stand for more than memory holds.
        content = read_bytes(config, _GUESS_BYTES)
        if b"&" in content or any(text.startswith("data.tokenizer") for text in overrides):
            return None, "auto"
        named = yaml.load(content, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))["data"]["tokenizer"]
        path, encoder = named["path"], named.get("encoder", "auto")
    except Exception:  # whatever is wrong with the config is said where it is checked
        return None, "auto"
    return Path(path) if isinstance(path, str) else None, encoder


def begin_loading_said(words: Sequence[str]) -> None:
    """The same for the words behind `headway data prepare`, before they are understood, which takes a tenth of a short
    preparation: the first is taken for the config and the others for overrides, and options for words of their own. The
    reference is begun too, in a process that looks into the config itself."""
    global _reference
    words = [word for word in words if "--dry-run" not in words and not word.startswith("-")]
    # A copy of a process has none of its threads.
    if not words or _loading is not None or threading.active_count() > 1 or not hasattr(os, "fork"):
        return
    with suppress(OSError):  # no room for another process
        _reference = process = ReferenceProcess(lambda: _said(words))
        _begin(lambda: _made_short_beside(process))


def _said(words: Sequence[str]) -> Path | None:
    path, encoder = _named(Path(words[0]), words[1:])
    return _file_of(path) if encoder in _PRELOADED else None


def take_parsed(content: bytes) -> Any:
    """The JSON of these bytes of a `tokenizer.json`, its merges perhaps in their older form, if its loading was begun;
    None otherwise. It is handed out once, to be read only."""
    return None if _loading is None else _loading.parsed(content)


def take_loaded(content: bytes) -> Any:
    """The `fastokens` tokenizer of these bytes, if its loading was begun; None otherwise. It is handed out once."""
    global _loading
    begun, _loading = _loading, None
    return None if begun is None else begun.loaded(content)


def take_reference() -> ReferenceProcess | None:
    """The process that has loaded the reference, if there is one, to be ended by who takes it."""
    global _reference
    begun, _reference = _reference, None
    return begun
