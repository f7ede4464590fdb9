"""What the files beside a tokenizer say of it: which tokens have a part to play, and which were added.

They are read as transformers' `AutoTokenizer` reads them (`PreTrainedTokenizerBase._from_pretrained`): with an
`added_tokens_decoder` in `tokenizer_config.json` that file comes first; else `special_tokens_map.json` does, and
`added_tokens.json` is looked at too. What it honours is honoured. Where it takes a token or an id for another one than
is written there, the files are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from headway.core.errors import DataError
from headway.core.foreign import read_json_object
from headway.data.tokenizing.spec import added_tokens, vocabulary

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
DECODER = "added_tokens_decoder"
#: Whether the begin-of-text token stands before a text, where no template says so.
BEGINS = "add_bos_token"
#: Parts that one token each can play.
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: Lists of further special tokens.
LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_AGREE = "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes files that agree"


class AddedToken(NamedTuple):
    """A token that a file says was added."""

    content: str
    flags: Mapping[str, Any]
    """Those that the file gives."""
    file: str


@dataclass(repr=False, eq=False)
class TokenizerSettings:
    """What the files in a folder say."""

    folder: Path
    values: Mapping[str, Any] = field(default_factory=dict)
    """`tokenizer_config.json`, with what else the others say."""
    added: Mapping[int, AddedToken] = field(default_factory=dict)
    """Added tokens by id."""
    special_by_default: bool = False
    """Added tokens are special where nothing is said."""
    adds_begin: bool = False
    """`add_bos_token` counts: the tokenizer's format has no template that says what stands before a text."""

    def role(self, name: str) -> str | None:
        """The token that plays a part.

        Raises:
            DataError: what is said of it is no token.
        """
        value = self.values.get(name)
        return None if value is None else self._token(value, name)

    def listed(self, name: str) -> list[str]:
        """The tokens of one of `LISTS`.

        Raises:
            DataError: it holds something else.
        """
        values = self.values.get(name) or []
        return [self._token(value, name) for value in (values.values() if isinstance(values, dict) else values)]

    def roles(self) -> dict[str, str]:
        """The tokens that play parts, by part; some models have more parts than `ROLES`.

        Raises:
            DataError: what is said of one is no token.
        """
        of_models = (key for key, value in self.values.items() if key.endswith("_token") and isinstance(value, str))
        return {key: text for key in (*ROLES, *of_models) if (text := self.role(key)) is not None}

    def named(self) -> set[str]:
        """All tokens with a part to play.

        Raises:
            DataError: what is said of one is no token.
        """
        return {*self.roles().values(), *(text for key in LISTS for text in self.listed(key))}

    def complete(self, spec: dict[str, Any]) -> bool:
        """Give a tokenizer.json the added tokens that it lacks, and those that it has the flags that they are said to
        have.

        Args:
            spec: Its content; changed.

        Returns:
            Whether it lacked anything.

        Raises:
            DataError: a token has another id than is said, or is none.
        """
        if not self.added and not any(map(self.listed, LISTS)):
            return False
        ids, listed = vocabulary(spec), {token["content"]: token for token in added_tokens(spec)}
        lacked = dict(self._lacked(ids, listed))
        unknown = [(key, text) for key in LISTS for text in self.listed(key) if text not in ids and text not in lacked]
        for key, text in unknown:
            raise self._error(f"{key} names {text!r}, which is no token", fix=f"take it out, or add it: {_AGREE}")
        if lacked:
            spec["added_tokens"] = list((listed | lacked).values())
            spec["added_tokens"] = added_tokens(spec)  # in the order of ids
        return bool(lacked)

    def _lacked(self, ids: dict[str, int], listed: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Entries of `added_tokens`."""
        named, following = self.named(), max(ids.values(), default=-1) + 1
        for number, token in sorted(self.added.items()):
            text, has = token.content, ids.get(token.content)
            if (following if has is None else has) != number:
                other = f"has the id {has:,}" if has is not None else f"would get the id {following:,}"
                raise self._error(f"{text!r}, which {other}, is said to have {number:,}", token.file, _AGREE)
            ids[text], following = number, following + (has is None)
            if token.file == ADDED and text in listed:
                continue
            is_special = self.special_by_default or (token.file == ADDED and text in named)
            special = bool(token.flags.get("special", is_special))
            flags = dict.fromkeys(_FLAGS, False) | {"special": special, "normalized": not special}
            flags |= {name: bool(token.flags[name]) for name in _FLAGS if name in token.flags}
            if {name: listed.get(text, {}).get(name) for name in flags} != flags:
                yield text, {"id": number, "content": text, **flags}

    def _token(self, value: Any, key: str) -> str:
        token = value.get("content") if isinstance(value, dict) else value
        if not isinstance(token, str):
            raise self._error(
                f"{key} is no token: {value!r:.60}", fix="write its text, or an object with it as content"
            )
        return token

    def _error(self, what: str, file: str = f"{CONFIG} or {MAP}", fix: str | None = None) -> DataError:
        return DataError(f"settings beside the tokenizer: {what}", where=str(self.folder / file), fix=fix)


def read_settings(folder: Path) -> TokenizerSettings:
    """Read the files in a folder; none of them need be there.

    Raises:
        DataError: one cannot be read, or is laid out otherwise.
    """
    config, others, legacy = (_object(folder / name) for name in (CONFIG, MAP, ADDED))
    others = {key: value for key, value in others.items() if value is not None}
    decoder = config.pop(DECODER, None)
    if decoder is None:
        return TokenizerSettings(folder, config | others, _from_legacy(legacy, folder / ADDED))
    values = others | {key: value for key, value in config.items() if value is not None}
    return TokenizerSettings(folder, values, _from_decoder(decoder, folder / CONFIG))


def _object(file: Path) -> dict[str, Any]:
    """The JSON object of a file; an empty one when there is no file."""
    try:
        return read_json_object(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(
            f"settings beside the tokenizer: the file {reason}",
            where=str(file),
            fix="repair it; or take it away, if the tokenizer is to be used without it",
        ) from None


def _from_decoder(decoder: Any, where: Path) -> dict[int, AddedToken]:
    try:
        added = {int(number): AddedToken(entry["content"], entry, CONFIG) for number, entry in decoder.items()}
        if not all(isinstance(token.content, str) for token in added.values()):
            raise TypeError
    except (AttributeError, KeyError, TypeError, ValueError):
        fix = 'write {"<id>": {"content": "<token>", "special": true}}'
        raise DataError(f"{DECODER} is not a token for each id", where=str(where), fix=fix) from None
    return added


def _from_legacy(tokens: dict[str, Any], where: Path) -> dict[int, AddedToken]:
    added = {number: AddedToken(text, {}, ADDED) for text, number in tokens.items() if type(number) is int}
    if len(added) < len(tokens):
        raise DataError("not another id for each token", where=str(where), fix='write {"<token>": <id>}')
    return added
