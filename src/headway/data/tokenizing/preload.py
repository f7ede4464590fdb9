"""Preloading of the fast encoder on a thread: loading takes longer than the rest of a short command's start.

Nothing heavy is imported here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from headway.core.files.foreign import read_bytes

#: Longer configs are not read ahead: PyYAML's C parser crashes the process if tens of thousands of lists are nested.
_GUESS_BYTES = 8192
#: Values of `data.tokenizer.encoder` for which `fastokens` is tried first.
_PRELOADED = ("auto", "fastokens")


def short_form(content: bytes) -> Any:
    """Parse a tokenizer.json, and write its merges as older files do, which libraries read in half the time.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: The content is not a tokenizer.json.
    """
    spec = orjson.loads(content)
    model = spec["model"]
    merges = model.get("merges")
    if merges and all(isinstance(pair, list) for pair in merges):
        joined = [" ".join(pair) for pair in merges]
        if all(merge.count(" ") == 1 for merge in joined):
            model["merges"] = joined
    return spec


class _Loading(threading.Thread):
    """Loads the vocabulary whose `tokenizer.json` a function returns."""

    def __init__(self, content_of: Callable[[], bytes]) -> None:
        # Not a daemon thread, so a command that ends with an error waits for it. Python kills daemon threads at
        # interpreter shutdown in a way that makes the library abort the process.
        super().__init__(name="headway-load-encoder")
        self._content_of = content_of
        self._is_parsed = threading.Event()
        self._content: bytes | None = None
        self._spec: Any = None
        self._library: Any = None

    def run(self) -> None:
        """Load the vocabulary; any error is ignored, since it occurs again, and is reported, in the regular load."""
        try:
            content = self._content_of()
            spec = short_form(content)
            self._spec = spec
            self._content = content
            self._is_parsed.set()
            import fastokens

            self._library = fastokens.Tokenizer.from_json_str(orjson.dumps(spec).decode())
        except BaseException:  # a panic of the library too
            self._library = None
        finally:
            self._is_parsed.set()

    @property
    def has_failed(self) -> bool:
        """Whether no readable vocabulary was found."""
        return self._is_parsed.is_set() and self._content is None

    def parsed(self, content: bytes) -> Any:
        """Hand out the parsed JSON once; return None if it is not that of `content`."""
        self._is_parsed.wait()
        spec = self._spec
        self._spec = None
        return spec if self._content == content else None

    def loaded(self, content: bytes) -> Any:
        """Return the library's tokenizer; None if it is not that of `content`."""
        self.join()
        return self._library if self._content == content else None


_loading: _Loading | None = None


def begin_loading(content_of: Callable[[], bytes], encoder: str) -> None:
    """Begin to load the vocabulary that `fastokens` will probably use, unless one is being loaded already.

    Args:
        content_of: Returns the bytes of its `tokenizer.json`.
        encoder: `data.tokenizer.encoder`.
    """
    global _loading
    if encoder in _PRELOADED and (_loading is None or _loading.has_failed):
        _loading = _Loading(content_of)
        _loading.start()


def begin_loading_file(path: Path | str | None, encoder: str) -> None:
    """Begin to load the vocabulary at `data.tokenizer.path`, if that is a `tokenizer.json` or a folder with one.

    Other vocabularies are not preloaded.
    """
    file = _file_of(path)
    if file is not None:
        begin_loading(lambda: read_bytes(file), encoder)


def _file_of(path: Path | str | None) -> Path | None:
    """Return the `tokenizer.json` that a path denotes, if any."""
    if not isinstance(path, Path):  # a tokenizer of the Hub may have to be downloaded
        return None
    file = path / "tokenizer.json" if path.is_dir() else path
    return file if file.suffix == ".json" and file.is_file() else None


def begin_loading_named(config: Path, overrides: Sequence[str]) -> None:
    """Begin to load the vocabulary that a config seems to name, before the config is validated.

    A wrong guess costs only time, since a loaded vocabulary is used only for identical content.

    Args:
        config: The YAML file; the files it is based on are not read.
        overrides: `key.path=value` strings.
    """
    begin_loading_file(*_named(config, overrides))


def _named(config: Path, overrides: Sequence[str]) -> tuple[Path | None, str]:
    """Guess `data.tokenizer.path` and `encoder` of a config."""
    try:
        import yaml

        # With anchors (&name), a few lines can expand to more than memory holds.
        content = read_bytes(config, _GUESS_BYTES)
        if b"&" in content or any(text.startswith("data.tokenizer") for text in overrides):
            return None, "auto"
        named = yaml.load(content, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))["data"]["tokenizer"]
        path = named["path"]
        encoder = named.get("encoder", "auto")
    except Exception:  # the validation of the config reports any error
        return None, "auto"
    return Path(path) if isinstance(path, str) else None, encoder


def take_parsed(content: bytes) -> Any:
    """Take the parsed JSON of a `tokenizer.json`, if it was preloaded; return None otherwise.

    Its merges may be in their older form. It is handed out once, and must not be changed.
    """
    return None if _loading is None else _loading.parsed(content)


def take_loaded(content: bytes) -> Any:
    """Take the `fastokens` tokenizer of a `tokenizer.json`, if it was preloaded; it is handed out once."""
    global _loading
    begun = _loading
    _loading = None
    return None if begun is None else begun.loaded(content)
