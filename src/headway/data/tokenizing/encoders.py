"""Text to token ids at full speed: the fastest library that gives exactly the ids of `tokenizers` for a vocabulary.

Libraries differ in the features they support and in their Unicode tables, so none is trusted. Before a library is used,
its ids are compared with the reference on a sample of the corpus and on edge cases. The choice affects only the speed.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headway.core.arrays import Ints
from headway.core.console import notice
from headway.core.errors import ConfigError, DataError
from headway.core.process.variables import with_variables
from headway.data.tokenizing import spec as specs
from headway.data.tokenizing.edge_case_texts import edge_case_texts, shortened
from headway.data.tokenizing.library import LibraryPanic, UnencodableTextError, panics_as_errors
from headway.data.tokenizing.preload import begin_loading, take_loaded
from headway.data.tokenizing.tokenizer import Tokenizer, not_unicode

REFERENCE = "tokenizers"
# Characters of the parts of long texts that are encoded in one call.
_GROUP_CHARACTERS = 2**20
#: Environment variables for the number of threads of a library, in order of precedence.
_THREAD_VARIABLES = ("FASTOKENS_BPE_THREADS", "RAYON_NUM_THREADS")

#: The reference's ids and lengths for some texts, as a future.
Expected = Future[tuple[NDArray[Any], Ints]]


class TextEncoder(Protocol):
    """An encoder that `open_encoder` returns."""

    name: str

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[Any], Ints]:
        """Encode texts to token ids.

        Returns:
            The ids of all texts, one after another, in the tokenizer's `dtype`; and the number of ids of each text,
            (texts,). No end-of-text token is added.

        Raises:
            UnencodableTextError: A text cannot be encoded; for example, UTF-8 cannot represent it (it holds half of a
                surrogate pair).
        """
        ...


class _Reference:
    name = REFERENCE

    def __init__(self, tokenizer: Tokenizer, special_tokens_in_text: bool) -> None:
        self._tokenizer = tokenizer
        self._special = special_tokens_in_text

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[Any], Ints]:
        arrays = self._tokenizer.encode_arrays(texts, special_tokens_in_text=self._special)
        return _flat(arrays, self._tokenizer.dtype)


class _Fast:
    """The base of the fast encoders, which encodes texts of any length in bounded memory."""

    name: str

    def __init__(self, tokenizer: Tokenizer, special_tokens_in_text: bool) -> None:
        self._dtype = tokenizer.dtype
        self._tokenizer = tokenizer
        self._special = special_tokens_in_text

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[Any], Ints]:
        batch = texts if isinstance(texts, list) else list(texts)
        try:
            with panics_as_errors():
                if max(map(len, batch), default=0) <= 2 * specs.PART_CHARACTERS:
                    return self._encode(batch)
                return self._encode_long(batch)
        except (UnicodeEncodeError, TypeError):
            raise not_unicode(batch) from None
        except LibraryPanic:
            # The reference may be able to encode the texts; if not, its error counts.
            return _Reference(self._tokenizer, self._special).encode(batch)

    def _encode_long(self, texts: list[str]) -> tuple[NDArray[Any], Ints]:
        """Encode texts in parts, as the reference does: a library may need fifty times the length of a long word."""
        ids: list[NDArray[Any]] = []
        counts = np.zeros(len(texts), np.int64)
        owned = ((number, part) for number, text in enumerate(texts) for part in self._tokenizer.parts(text))
        for group in _grouped(owned, _GROUP_CHARACTERS):
            owners, parts = zip(*group, strict=True)
            part_ids, lengths = self._encode(list(parts))
            ids.append(part_ids)
            np.add.at(counts, list(owners), lengths)
        return np.concatenate(ids), counts

    def _encode(self, texts: list[str]) -> tuple[NDArray[Any], Ints]:
        raise NotImplementedError


class _Fastokens(_Fast):
    """`fastokens`: exact on every character of Unicode for the patterns of gpt2, Llama 3, Qwen and o200k; Apache-2.0.

    Each of its threads has a cache of words, of at most about 140 MB.
    """

    name = "fastokens"

    def __init__(self, tokenizer: Tokenizer, special_tokens_in_text: bool) -> None:
        import fastokens

        super().__init__(tokenizer, special_tokens_in_text)
        content = tokenizer.content_for(special_tokens_in_text)
        self._library = take_loaded(content) or fastokens.Tokenizer.from_json_str(content.decode())
        self._library.no_truncation()
        self._library.no_padding()

    def _encode(self, texts: list[str]) -> tuple[NDArray[Any], Ints]:
        ids, offsets = self._library.encode_batch_flat(texts, split_special_tokens=not self._special)
        bounds = np.frombuffer(offsets, "<u8").astype(np.int64)
        return np.frombuffer(ids, "<u4").astype(self._dtype), bounds[1:] - bounds[:-1]


class _Gigatoken(_Fast):
    """`gigatoken`: MIT; on the calling thread.

    It always encodes an added token in a text as that token, so special ones are removed from its vocabulary.
    """

    name = "gigatoken"

    def __init__(self, tokenizer: Tokenizer, special_tokens_in_text: bool) -> None:
        import gigatoken
        import orjson

        super().__init__(tokenizer, special_tokens_in_text)
        content = tokenizer.content_for(special_tokens_in_text)
        if not special_tokens_in_text:
            spec = orjson.loads(content)
            spec["added_tokens"] = [token for token in spec.get("added_tokens") or [] if not token.get("special")]
            content = orjson.dumps(spec)
        self._library = gigatoken.Tokenizer.from_json(content)

    def _encode(self, texts: list[str]) -> tuple[NDArray[Any], Ints]:
        # One text at a time: batches need `awkward`, whose import costs more time than batches save.
        return _flat([self._library.encode(text) for text in texts], self._dtype)


def _grouped(parts: Iterable[tuple[int, str]], size: int) -> Iterator[list[tuple[int, str]]]:
    """Group parts, each with the number of its text, into lists of about `size` characters."""
    group: list[tuple[int, str]] = []
    characters = 0
    for number, part in parts:
        group.append((number, part))
        characters += len(part)
        if characters >= size:
            yield group
            group = []
            characters = 0
    if group:
        yield group


def _flat(arrays: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> tuple[NDArray[Any], Ints]:
    lengths = np.array([len(array) for array in arrays], dtype=np.int64)
    flat = np.concatenate(arrays) if arrays else np.empty(0, dtype)
    return flat.astype(dtype, copy=False), lengths


_FAST: dict[str, Callable[[Tokenizer, bool], TextEncoder]] = {"fastokens": _Fastokens, "gigatoken": _Gigatoken}
#: In order of preference: of equally fast encoders, the one that is exact for more vocabularies comes first.
ENCODERS = (*_FAST, REFERENCE)

# The encoder that was opened last: usually, the encoder that was just checked is the one that is used.
_last: tuple[tuple[str, str, bool], TextEncoder] | None = None


def open_encoder(
    name: str, tokenizer: Tokenizer, special_tokens_in_text: bool = False, threads: int | None = None
) -> TextEncoder:
    """Open the encoder that `choose_encoder` has chosen. Several threads may share it, and it works after a fork.

    Args:
        name: One of `ENCODERS`.
        tokenizer: The vocabulary.
        special_tokens_in_text: Encode special tokens that a text spells out as those tokens, not as ordinary text.
        threads: Threads that one call may use; all cores when not given. A library keeps the number that applied when
            the process first encoded.

    Raises:
        ConfigError: There is no such encoder, or it is not installed.
        DataError: The encoder does not support the vocabulary.
    """
    global _last
    key = (name, tokenizer.fingerprint, special_tokens_in_text)
    if _last is not None and _last[0] == key:
        return _last[1]
    if name == REFERENCE:
        if threads == 1:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
        return _Reference(tokenizer, special_tokens_in_text)
    if name not in _FAST:
        raise ConfigError(f"no encoder '{name}'", where="data.tokenizer.encoder", fix=f"one of {', '.join(ENCODERS)}")
    if importlib.util.find_spec(name) is None:
        raise ConfigError(
            f"data.tokenizer.encoder: {name} needs the package '{name}', which is not installed.",
            fix=f"pip install {name}",
        )
    try:
        with with_variables(_thread_variables(threads)), panics_as_errors():
            encoder = _FAST[name](tokenizer, special_tokens_in_text)
            encoder.encode(["a"])
    except Exception as error:  # libraries raise errors of any type
        fix = "set data.tokenizer.encoder: auto"
        reason = str(error).strip().split("\n")[0][:200]
        raise DataError(f"{name} cannot use the tokenizer: {reason}", where=tokenizer.where, fix=fix) from None
    _last = (key, encoder)
    return encoder


def _thread_variables(count: int | None) -> dict[str, str]:
    """Return the variables that say with how many threads a library starts; none to leave it to the library."""
    return {} if count is None else dict.fromkeys(_THREAD_VARIABLES, str(count))


def choose_encoder(
    tokenizer: Tokenizer,
    wanted: str,
    sample: Iterable[str],
    special_tokens_in_text: bool = False,
    threads: int | None = None,
) -> str:
    """Choose the fastest encoder that gives the reference's ids on a sample and on edge cases.

    None of these texts may become a special token, unless `special_tokens_in_text` is set. `auto` falls back to
    `tokenizers` with a notice that says why.

    Args:
        tokenizer: The vocabulary.
        wanted: `auto`, or one of `ENCODERS`.
        sample: Texts of the corpus; only the beginnings of the first ones are compared.
        special_tokens_in_text: As in `open_encoder`.
        threads: As in `open_encoder`, which will return the encoder opened here.

    Raises:
        ConfigError: The wanted encoder does not exist or is not installed.
        DataError: The wanted encoder is not exact, or makes a special token of text; the message shows the first text.
    """
    texts = edge_case_texts([tokenizer.end_of_text, *tokenizer.special_tokens, *tokenizer.added_tokens])
    texts += [2 * name for name in tokenizer.byte_names]
    if wanted == REFERENCE:
        try:
            encoded = _Reference(tokenizer, special_tokens_in_text).encode(texts)
        except UnencodableTextError as error:
            return _fall_back(tokenizer, wanted, texts, special_tokens_in_text, error)
        _check_no_special_tokens(tokenizer, texts, encoded, special_tokens_in_text)
        return REFERENCE
    # Set before the libraries' threads begin: reading the environment while it grows can crash the process.
    with with_variables(_thread_variables(threads)):
        begin_loading(lambda: tokenizer.content_for(special_tokens_in_text), wanted)
        texts += shortened(sample)
        # Wait for the reference last: it holds the interpreter lock while it loads, unlike the fast encoders.
        with ThreadPoolExecutor(1, "headway-reference") as pool:
            expected = pool.submit(_Reference(tokenizer, special_tokens_in_text).encode, texts)
            try:
                chosen = _choose_exact(
                    tokenizer, wanted, texts, expected, special_tokens_in_text=special_tokens_in_text, threads=threads
                )
            except UnencodableTextError as error:
                return _fall_back(tokenizer, wanted, texts, special_tokens_in_text, error)
    _check_no_special_tokens(tokenizer, texts, expected.result(), special_tokens_in_text)
    return chosen


def _fall_back(
    tokenizer: Tokenizer, wanted: str, texts: Sequence[str], special_tokens_in_text: bool, error: DataError
) -> str:
    """Choose the reference for a vocabulary that cannot encode every text, since it reports which texts fail.

    Raises:
        DataError: Another encoder is wanted, or ordinary text becomes a special token.
    """
    reference = _Reference(tokenizer, special_tokens_in_text)
    usable = []
    for text in texts:
        with suppress(UnencodableTextError):
            usable.append((text, *reference.encode([text])))
    if wanted not in ("auto", REFERENCE):
        raise error
    encoded = np.concatenate([ids for _, ids, _ in usable]), np.concatenate([lengths for _, _, lengths in usable])
    _check_no_special_tokens(tokenizer, [text for text, _, _ in usable], encoded, special_tokens_in_text)
    notice(f"encoding with `tokenizers`, at about a twentieth of the speed: some texts cannot be encoded: {error.what}")
    return REFERENCE


def _check_no_special_tokens(
    tokenizer: Tokenizer, texts: Sequence[str], encoded: tuple[NDArray[Any], Ints], asked_for: bool
) -> None:
    """Check that texts which spell out special tokens and names of bytes are not encoded as those tokens.

    Raises:
        DataError: A text is; the message shows it.
    """
    ids, lengths = encoded
    special = np.isin(ids, list(tokenizer.forbidden_ids - tokenizer.unavoidable.keys()))
    if asked_for or not (special.any() or tokenizer.byte_names):
        return
    names = {number: token for token, number in tokenizer.special_tokens.items()}
    ends = np.cumsum(lengths)
    for text, start, end in zip(texts, ends - lengths, ends, strict=True):
        found = names[int(ids[start:end][special[start:end]][0])] if special[start:end].any() else None
        name = text[: len(text) // 2]
        # A byte that the text itself contains may have no other token in the vocabulary.
        if name in tokenizer.byte_names and int(name[3:5], 16) not in (text + " ▁").encode():
            found = name if tokenizer.byte_names[name] in ids[start:end] else found
        if found is not None:
            raise DataError(
                f"ordinary text is encoded as the special token {found!r}: {text[:60]!r}",
                where=tokenizer.where,
                fix="data.tokenizer.special_tokens_in_text=true, if texts are to hold special tokens",
            )


def _choose_exact(
    tokenizer: Tokenizer,
    wanted: str,
    texts: Sequence[str],
    expected: Expected,
    *,
    special_tokens_in_text: bool,
    threads: int | None,
) -> str:
    """Choose an encoder that gives the expected ids for the texts; see `choose_encoder`."""
    if wanted != "auto":
        encoder = open_encoder(wanted, tokenizer, special_tokens_in_text, threads)
        difference = _difference(encoder, texts, expected)
        if difference:
            raise DataError(
                f"{wanted} does not encode as `tokenizers` does: {difference}",
                where=tokenizer.where,
                fix="set data.tokenizer.encoder: auto",
            )
        return wanted
    reasons = []
    for name in _FAST:
        if importlib.util.find_spec(name) is None:
            continue
        try:
            encoder = open_encoder(name, tokenizer, special_tokens_in_text, threads)
        except DataError as error:
            reasons.append(error.what)
            continue
        difference = _difference(encoder, texts, expected)
        if not difference:
            return name
        reasons.append(f"{name} differs: {difference}")
    expected.result()  # an error of the vocabulary itself has precedence over the reasons of the encoders
    notice(
        "encoding with `tokenizers`, at about a twentieth of the speed: "
        + "; ".join(reasons or ["no other is installed"])
    )
    return REFERENCE


def _difference(encoder: TextEncoder, texts: Sequence[str], expected: Expected) -> str | None:
    """Describe the first text whose ids differ from the expected ones; return None if there is none."""
    try:
        ids, lengths = encoder.encode(texts)
    except Exception as error:
        return str(error)
    right_ids, right_lengths = expected.result()
    if np.array_equal(lengths, right_lengths) and np.array_equal(ids, right_ids):
        return None
    one = np.split(ids, np.cumsum(lengths)[:-1])
    other = np.split(right_ids, np.cumsum(right_lengths)[:-1])
    for text, mine, theirs in zip(texts, one, other, strict=True):
        if not np.array_equal(mine, theirs):
            size = min(len(mine), len(theirs))
            unequal = np.flatnonzero(mine[:size] != theirs[:size])
            at = int(unequal[0]) if len(unequal) else size
            return f"{text[:60]!r} at token {at}: {mine[at : at + 4].tolist()}, not {theirs[at : at + 4].tolist()}"
    return "it returns a different number of texts"
