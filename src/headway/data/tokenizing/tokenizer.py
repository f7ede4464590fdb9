"""Text to token ids and back, with any `tokenizer.json` or file that can be converted into one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import ConfigError, DataError
from headway.core.files.atomic import atomic_write, sync_folder, write_json
from headway.core.files.foreign import read_bytes
from headway.core.files.hashes import sha256_bytes
from headway.data.tokenizing import spec as specs
from headway.data.tokenizing.begin_of_text import tokens_before
from headway.data.tokenizing.files import read_tokenizer
from headway.data.tokenizing.library import (
    LibraryPanic,
    UnencodableTextError,
    encode,
    numbers_of,
    open_library,
    panics_as_errors,
)
from headway.data.tokenizing.settings_files import BEGINS, TokenizerSettings
from headway.data.tokenizing.special import special_in_text

#: `data.begin_of_text`.
BeginOfText = Literal["auto", "always", "never"]


class Tokenizer:
    """A vocabulary, from `Tokenizer.load`.

    The methods below are the reference: Hugging Face `tokenizers`. The module `encoders` gives identical ids faster.

    Attributes:
        vocab_size: Number of token ids: every id is below it.
        end_of_text_id: The id of the token that ends a document.
        end_of_text: The text of that token.
        fingerprint: Hex SHA-256 of `tokenizer.json`.
        content: The bytes of `tokenizer.json`, with added tokens that only files next to it name.
        where: The file it comes from, for messages.
        special_tokens: Special tokens with their ids: those marked as such, the end-of-text token, and those to which
            the files next to the tokenizer give another role.
        unknown_id: The id of the unknown token; None if there is none.
        added_tokens: Texts of the added tokens, which are matched in any text.
        settings: The settings in the files next to it.
        unknown_roles: Tokens that have a role in these settings but are not in the vocabulary, by role.
        was_cut_otherwise: Earlier versions cut long texts where that may have changed their ids.
        template_tokens: The tokens, with ids, that its template puts before a text; in formats without templates, the
            token that `add_bos_token` puts there.
        special_in_text: The ways in which a library would make special tokens of text; `content_for` closes them.
        forbidden_ids: Special tokens that no text may become unless that is asked for: all but the unknown token.
        unavoidable: Special tokens, by id, that some text becomes nevertheless; such text cannot be used.
        byte_names: Tokens for single bytes of characters that have no token, with their ids.
    """

    def __init__(
        self, content: bytes, where: str, end_of_text: str | None = None, settings: TokenizerSettings | None = None
    ) -> None:
        self.where = where
        self.settings = settings or TokenizerSettings(Path(where).parent)
        spec = specs.parse(content, where)
        try:
            spec, content = self._completed(spec, content)
            self.content = content
            self.fingerprint = sha256_bytes(content)
            ids = specs.vocabulary(spec)
            named = self.settings.named()
            specs.check_unique_ids(ids, where)
            self.vocab_size = max(ids.values(), default=-1) + 1
            end_of_text = self.settings.role("eos_token") or end_of_text
            self.end_of_text = specs.end_of_text(ids, end_of_text, where)
            self.end_of_text_id = ids[self.end_of_text]
            self.unknown_id = specs.unknown_id(spec, ids)
            self.added_tokens: list[str] = [token["content"] for token in specs.added_tokens(spec)]
            role = self.settings.role("bos_token")
            self._begin = {role: ids[role]} if role is not None and role in ids else {}
            self.template_tokens = self._named(tokens_before(spec), ids)
            if self.settings.adds_begin and not self.template_tokens:
                self.template_tokens = self._begin
            self.unknown_roles = {key: token for key, token in self.settings.roles().items() if token not in ids}
            ways = special_in_text(spec, self.end_of_text, named & ids.keys())
            self.special_in_text = ways
            self.special_tokens = {token: ids[token] for token in sorted(ways.special, key=ids.__getitem__)}
            self.unavoidable = {ids[token]: token for token in ways.unavoidable}
            unknown = {self.unknown_id} - {self.end_of_text_id}
            self.forbidden_ids = frozenset(self.special_tokens.values()) - unknown
            self.byte_names = {name: ids[name] for name in ways.byte_names}
            self._added_ids = {token: ids[token] for token in self.added_tokens}
            self._cutting = specs.cutting(spec)
            self.was_cut_otherwise = specs.was_cut_otherwise(spec)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            reason = f"its JSON is not laid out like a tokenizer.json ({type(error).__name__}: {error})"
            raise DataError(f"not a tokenizer: {reason}", where=where, fix="give a tokenizer.json") from None

    def _completed(self, spec: dict[str, Any], content: bytes) -> tuple[dict[str, Any], bytes]:
        """Return the file, with the tokens that the files next to it add."""
        import orjson

        if not self.settings.complete({"model": spec["model"], "added_tokens": spec.get("added_tokens")}):
            return spec, content
        spec = orjson.loads(content)  # the given one must not be changed, and may have merges in another form
        self.settings.complete(spec)
        return spec, orjson.dumps(spec)

    @classmethod
    def load(cls, path: Path | str, pattern: str | None = None) -> Tokenizer:
        """Load a `tokenizer.json`, a SentencePiece `.model`, a `.tiktoken` file or a `tekken.json`.

        A folder (a Hugging Face checkpoint, a token store) stands for the first of these in it. Other formats are
        converted into a tokenizer.json with identical ids. Tokens that only the files next to it name are added.

        Args:
            path: The file or folder, or `hf://organisation/name@revision`.
            pattern: For a `.tiktoken` file, which does not contain the pattern that splits text: a name in
                `patterns.PATTERNS`, or a regular expression.

        Raises:
            ConfigError: The Hub cannot be reached, or has no such model.
            DataError: There is no such file, it is not a tokenizer, it has no end-of-text token, or the files next to
                it contradict it.
        """
        found = read_tokenizer(path, pattern)
        return cls(found.content, str(found.path), found.end_of_text, found.settings)

    def _named(self, numbers: Sequence[int], ids: Mapping[str, int]) -> dict[str, int]:
        """Return the tokens with the given ids."""
        if not numbers:
            return {}
        token_of = {number: token for token, number in ids.items()}
        missing = [number for number in numbers if number not in token_of]
        if missing:
            raise DataError(
                f"its template puts a token before texts that it does not have: {missing[0]:,}",
                where=self.where,
                fix="repair the post_processor of the tokenizer.json",
            )
        return {token_of[number]: number for number in numbers}

    def begin_of_text(self, wanted: BeginOfText = "auto") -> dict[str, int]:
        """Return the tokens that begin every document, with ids: usually one token or none.

        Args:
            wanted: `data.begin_of_text`.

        Raises:
            ConfigError: It is `always`, but no begin-of-text token is known.
        """
        if wanted == "never" or (wanted == "auto" and not self.template_tokens):
            return {}
        if self.template_tokens:
            return self.template_tokens
        if not self._begin:
            raise ConfigError(
                "the tokenizer has no begin-of-text token",
                where=f"data.begin_of_text, {self.where}",
                fix="name one of its tokens as bos_token in the tokenizer_config.json next to it",
            )
        return self._begin

    def usual_begin(self) -> dict[str, int]:
        """Return the one token that begins documents in other projects: of the template, or `bos_token`; or none."""
        found = self.template_tokens or self._begin
        return found if len(found) == 1 else {}

    def saved_begin_of_text(self) -> dict[str, int]:
        """Return the tokens that begin every document of this tokenizer's store, by the settings next to it."""
        return self.begin_of_text("always" if self.settings.values.get(BEGINS) is True else "never")

    @cached_property
    def _backend(self) -> Any:
        # "<|endoftext|>" spelled out in a document is ordinary text, never the end of it.
        return self._open_backend(special_tokens_in_text=False)

    @cached_property
    def _special_backend(self) -> Any:
        return self._open_backend(special_tokens_in_text=True)

    def content_for(self, special_tokens_in_text: bool) -> bytes:
        """Return the tokenizer.json for a library, which makes special tokens of text only if that is asked for."""
        return self._special_as_tokens if special_tokens_in_text else self._special_as_text

    @cached_property
    def _special_as_text(self) -> bytes:
        return self.special_in_text.as_text(self.content)

    @cached_property
    def _special_as_tokens(self) -> bytes:
        return self.special_in_text.as_tokens(self.content)

    def _open_backend(self, special_tokens_in_text: bool) -> Any:
        # Opened on first use: processes that encode with another library need no second copy.
        try:
            backend = open_library(self.content_for(special_tokens_in_text), special_tokens_in_text)
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"not a tokenizer: {error}", where=self.where, fix="give a tokenizer.json") from None
        self._check_no_gaps(backend, special_tokens_in_text)
        return backend

    def _check_no_gaps(self, backend: Any, special_tokens_in_text: bool) -> None:
        """Check that the library gives special and added tokens the ids in the file."""
        hidden = {} if special_tokens_in_text else self.special_in_text.hidden
        names = {token: hidden.get(token, token) for token in (*self.special_tokens, *self.added_tokens)}
        numbers = numbers_of(backend, names.values())
        for token, number in (self.special_tokens | self._added_ids).items():
            found = numbers[names[token]]
            if found != number:
                raise DataError(
                    f"the tokenizer's ids have a gap: {token} is {number} in the file, but {found} in the library",
                    where=self.where,
                    fix="give every id below it a token in model.vocab",
                )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of ids in the token store: little-endian uint16 if every id fits, else uint32."""
        return np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text to ids; special tokens that it spells out are ordinary text, and no token is added."""
        return [ids.tolist() for ids in self.encode_arrays(texts)]

    def encode_arrays(self, texts: Sequence[str], *, special_tokens_in_text: bool = False) -> list[NDArray[Any]]:
        """Encode each text to an array of `dtype`.

        Memory is bounded for texts of any length with the usual vocabularies (`spec.cutting`): a long text is encoded
        in parts, which gives identical ids unless a single word has tens of thousands of characters. If the vocabulary
        does not allow for that, memory has no bound.

        Args:
            texts: The texts.
            special_tokens_in_text: Encode special tokens that a text spells out as those tokens.

        Raises:
            UnencodableTextError: A text cannot be encoded; for example, UTF-8 cannot represent it (it holds half of a
                surrogate pair).
        """
        backend = self._special_backend if special_tokens_in_text else self._backend
        results: list[NDArray[Any]] = []
        batch: list[str] = []
        size = 0
        for text in texts:
            if len(text) > 2 * specs.PART_CHARACTERS and self._cutting:
                results += self._encode(backend, batch)
                pieces = [self._encode(backend, [part])[0] for part in self.parts(text)]
                results.append(np.concatenate(pieces))
                batch = []
                size = 0
                continue
            batch.append(text)
            size += len(text)
            if size >= specs.PART_CHARACTERS:
                results += self._encode(backend, batch)
                batch = []
                size = 0
        return results + self._encode(backend, batch)

    def parts(self, text: str) -> Iterator[str]:
        """Cut a long text where that does not change its tokens, if possible; a short text is one part."""
        return specs.parts(text, self._cutting)

    def _encode(self, backend: Any, texts: list[str]) -> list[NDArray[Any]]:
        if not texts:
            return []
        try:
            return [np.array(ids, dtype=self.dtype) for ids in encode(backend, texts)]
        except TypeError:
            raise not_unicode(texts) from None
        except Exception as error:  # the library raises bare Exception
            reason = str(error).strip().split("\n")[0][:200]
            raise UnencodableTextError(f"the tokenizer cannot encode a text: {reason}", where=self.where) from None

    def decode(self, ids: Sequence[int] | NDArray[Any], *, skip_special_tokens: bool = True) -> str:
        """Decode token ids to text."""
        backend = self._backend if self._special_as_text is self._special_as_tokens else self._special_backend
        try:
            with panics_as_errors():
                return str(backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens))
        except LibraryPanic as error:
            raise DataError(f"the tokenizer cannot decode: {error}", where=self.where) from None

    def save(
        self, folder: Path, settings: Mapping[str, Any] | None = None, begin: Mapping[str, int] | None = None
    ) -> None:
        """Write `tokenizer.json` and the `tokenizer_config.json` with which transformers' AutoTokenizer loads it.

        Args:
            folder: The folder to write to.
            settings: Further settings for `tokenizer_config.json`.
            begin: The tokens that begin every document of the store, for `saved_begin_of_text`.
        """
        begins: dict[str, Any] = {BEGINS: bool(begin)} if begin or self.template_tokens else {}
        if begin and not self.template_tokens:
            begins["bos_token"] = next(iter(begin))
        with atomic_write(folder / "tokenizer.json") as file:
            file.write(self.content)
        config = {
            **(settings or {}),
            **begins,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.end_of_text,
            "clean_up_tokenization_spaces": False,
        }
        write_json(folder / "tokenizer_config.json", config, exact=True)


def keep_copy(source: Path, folder: Path, fingerprint: str) -> None:
    """Copy the folder of a tokenizer to `folder`, which is complete or absent at any moment.

    Nothing happens if `folder` is such a copy already, or if `source` is not the tokenizer with that fingerprint.
    """
    files = _files_in(source)
    if sha256_bytes(files.get("tokenizer.json", b"")) != fingerprint or _files_in(folder) == files:
        return
    building = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(building, ignore_errors=True)  # a killed process may have left it
    try:
        for name, content in files.items():
            with atomic_write(building / name) as file:
                file.write(content)
        shutil.rmtree(folder, ignore_errors=True)
        building.rename(folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def _files_in(folder: Path) -> dict[str, bytes]:
    """Read the files in a tokenizer's folder, except incomplete ones that a killed process may have left."""
    if not folder.is_dir():
        return {}
    return {file.name: read_bytes(file) for file in folder.iterdir() if file.is_file() and file.name[:1] != "."}


def not_unicode(texts: Sequence[str]) -> UnencodableTextError:
    """Return the error for the first text that UTF-8 cannot represent."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            start = max(0, error.start - 20)
            where = f"character {error.start:,}, after {text[start : error.start]!r}"
            return UnencodableTextError(f"a text is not valid Unicode: {error.reason}", where=where)
    return UnencodableTextError("a text cannot be encoded")
