"""Loading a fast encoder ahead of its use: it takes longer than the rest of a short command's start, and lets others
run meanwhile. Nothing heavy is imported here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

#: Longer configs are not looked into ahead: PyYAML's C part ends the program where ten thousands of lists are nested.
_GUESS_BYTES = 8192


class _Loading(threading.Thread):
    """Loads the `tokenizer.json` that a function gives."""

    def __init__(self, content_of: Callable[[], bytes]) -> None:
        # No daemon: a command that ends with an error waits for it, since Python ends such threads at its exit in a way
        # that the library takes for a fault of its own, and aborts the process.
        super().__init__(name="headway-load-encoder")
        self._content_of = content_of
        self.content: bytes | None = None
        self.library: Any = None

    def run(self) -> None:
        """Whatever goes wrong here goes wrong again, and is reported, where the vocabulary is loaded for good."""
        try:
            content = self._content_of()
            import fastokens

            self.library, self.content = fastokens.Tokenizer.from_json_str(content.decode()), content
        except Exception:
            self.library = None


_loading: _Loading | None = None


def begin_loading(content_of: Callable[[], bytes], encoder: str) -> None:
    """Begin to load a vocabulary that `fastokens` will probably encode with, unless one is being loaded already.

    Args:
        content_of: Gives the bytes of its `tokenizer.json`.
        encoder: `data.tokenizer.encoder`.
    """
    global _loading
    if encoder in ("auto", "fastokens") and _loading is None:
        _loading = _Loading(content_of)
        _loading.start()


def begin_loading_file(path: Path | None, encoder: str) -> None:
    """The same for `data.tokenizer.path`: a `tokenizer.json`, or a folder with one; other vocabularies have to wait."""
    if path is None:
        return
    path = path / "tokenizer.json" if path.is_dir() else path
    if path.suffix == ".json" and path.is_file():
        begin_loading(path.read_bytes, encoder)


def begin_loading_named(config: Path, overrides: Sequence[str]) -> None:
    """The same for the vocabulary that a config seems to name, before the config is read for good and while Python
    makes ready. A wrong guess costs time alone, since what was loaded is used for the same content only.

    Args:
        config: The YAML file; what it is based on is not looked into.
        overrides: `key.path=value` strings.
    """
    if _loading is not None:
        return  # the command line was looked into before it was understood
    try:
        import yaml

        content = config.read_bytes()
        if len(content) > _GUESS_BYTES:
            return
        named = yaml.load(content, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))["data"]["tokenizer"]
        path, encoder = named["path"], named.get("encoder", "auto")
    except Exception:  # whatever is wrong with the config is said where it is checked
        return
    if not any(text.startswith("data.tokenizer") for text in overrides) and isinstance(path, str):
        begin_loading_file(Path(path), encoder)


def begin_loading_said(words: Sequence[str]) -> None:
    """The same for the words behind `headway data prepare`, before they are understood, which takes a tenth of a short
    preparation: the first is taken for the config and the others for overrides, and options for words of their own."""
    words = [word for word in words if "--dry-run" not in words and not word.startswith("-")]
    if words:
        begin_loading_named(Path(words[0]), words[1:])


def take_loaded(content: bytes) -> Any:
    """The `fastokens` tokenizer of these bytes, if its loading was begun; None otherwise. It is handed out once."""
    global _loading
    begun, _loading = _loading, None
    if begun is None:
        return None
    begun.join()
    return begun.library if begun.content == content else None
