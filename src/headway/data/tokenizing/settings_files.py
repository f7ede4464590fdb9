"""The settings in the files next to a tokenizer: which tokens have a role, and which were added.

They are read as transformers' `AutoTokenizer` does (`PreTrainedTokenizerBase._from_pretrained`). If
`tokenizer_config.json` has an `added_tokens_decoder`, that file has precedence; otherwise `special_tokens_map.json`
has, and `added_tokens.json` is read too. Files are rejected where `AutoTokenizer` would use another token or id than
they name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from headway.core.errors import DataError
from headway.core.files.foreign import read_json_object
from headway.data.tokenizing.spec import added_tokens, vocabulary

CONFIG = "tokenizer_config.json"
MAP = "special_tokens_map.json"
ADDED = "added_tokens.json"
DECODER = "added_tokens_decoder"
#: Whether the begin-of-text token precedes a text, for tokenizers without a template.
BEGINS = "add_bos_token"
#: Roles, each of which one token can have.
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: Lists of further special tokens.
LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_AGREE = "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes files that agree"


class AddedToken(NamedTuple):
    """An added token that a file names."""

    content: str
    flags: Mapping[str, Any]
    """The flags that the file gives."""
    file: str


@dataclass(repr=False, eq=False)
class TokenizerSettings:
    """The settings in the files of a folder."""

    folder: Path
    values: Mapping[str, Any] = field(default_factory=dict)
    """The values of `tokenizer_config.json`, merged with those of the other files."""
    added: Mapping[int, AddedToken] = field(default_factory=dict)
    """Added tokens by id."""
    special_by_default: bool = False
    """Added tokens without a `special` flag are special."""
    adds_begin: bool = False
    """`add_bos_token` counts, since the tokenizer's format has no template for the tokens before a text."""

    def role(self, name: str) -> str | None:
        """Return the token that has a role.

        Raises:
            DataError: The value is not a token.
        """
        value = self.values.get(name)
        return None if value is None else self._token(value, name)

    def listed(self, name: str) -> list[str]:
        """Return the tokens of one of `LISTS`.

        Raises:
            DataError: The list holds something else.
        """
        values = self.values.get(name) or []
        return [self._token(value, name) for value in (values.values() if isinstance(values, dict) else values)]

    def roles(self) -> dict[str, str]:
        """Return the tokens that have roles, by role; some models have more roles than `ROLES`.

        Raises:
            DataError: A value is not a token.
        """
        of_models = (key for key, value in self.values.items() if key.endswith("_token") and isinstance(value, str))
        return {key: text for key in (*ROLES, *of_models) if (text := self.role(key)) is not None}

    def named(self) -> set[str]:
        """Return all tokens that have a role or are in `LISTS`.

        Raises:
            DataError: A value is not a token.
        """
        return {*self.roles().values(), *(text for key in LISTS for text in self.listed(key))}

    def complete(self, spec: dict[str, Any]) -> bool:
        """Add missing added tokens to a tokenizer.json, and set the flags of existing ones as the files do.

        Args:
            spec: Its content, which is changed in place.

        Returns:
            Whether anything was missing.

        Raises:
            DataError: A token has another id than in the files, or is not in the vocabulary.
        """
        if not self.added and not any(map(self.listed, LISTS)):
            return False
        ids = vocabulary(spec)
        listed = {token["content"]: token for token in added_tokens(spec)}
        lacked = dict(self._lacked(ids, listed))
        unknown = [(key, text) for key in LISTS for text in self.listed(key) if text not in ids and text not in lacked]
        for key, text in unknown:
            raise self._error(f"{key} names {text!r}, which is not a token", fix=f"remove it, or add it: {_AGREE}")
        if lacked:
            spec["added_tokens"] = list((listed | lacked).values())
            spec["added_tokens"] = added_tokens(spec)  # in the order of ids
        return bool(lacked)

    def _lacked(self, ids: dict[str, int], listed: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the entries of `added_tokens` that are missing or have other flags."""
        named = self.named()
        following = max(ids.values(), default=-1) + 1
        for number, token in sorted(self.added.items()):
            text = token.content
            has = ids.get(token.content)
            if (following if has is None else has) != number:
                other = f"has the id {has:,}" if has is not None else f"would get the id {following:,}"
                raise self._error(f"{text!r} {other}, but the file says {number:,}", token.file, _AGREE)
            ids[text] = number
            following += has is None
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
                f"{key} is not a token: {value!r:.60}", fix="write its text, or an object with it as content"
            )
        return token

    def _error(self, what: str, file: str = f"{CONFIG} or {MAP}", fix: str | None = None) -> DataError:
        return DataError(f"settings next to the tokenizer: {what}", where=str(self.folder / file), fix=fix)


def read_settings(folder: Path) -> TokenizerSettings:
    """Read the settings files in a folder; all of them are optional.

    Raises:
        DataError: A file cannot be read, or has another layout.
    """
    config, others, legacy = (_object(folder / name) for name in (CONFIG, MAP, ADDED))
    others = {key: value for key, value in others.items() if value is not None}
    decoder = config.pop(DECODER, None)
    if decoder is None:
        return TokenizerSettings(folder, config | others, _from_legacy(legacy, folder / ADDED))
    values = others | {key: value for key, value in config.items() if value is not None}
    return TokenizerSettings(folder, values, _from_decoder(decoder, folder / CONFIG))


def _object(file: Path) -> dict[str, Any]:
    """Read the JSON object of a file; return an empty one if there is no file."""
    try:
        return read_json_object(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(
            f"settings next to the tokenizer: the file {reason}",
            where=str(file),
            fix="repair it, or remove it to use the tokenizer without it",
        ) from None


def _from_decoder(decoder: Any, where: Path) -> dict[int, AddedToken]:
    try:
        added = {int(number): AddedToken(entry["content"], entry, CONFIG) for number, entry in decoder.items()}
        if not all(isinstance(token.content, str) for token in added.values()):
            raise TypeError
    except (AttributeError, KeyError, TypeError, ValueError):
        fix = 'write {"<id>": {"content": "<token>", "special": true}}'
        raise DataError(f"{DECODER} does not map ids to tokens", where=str(where), fix=fix) from None
    return added


def _from_legacy(tokens: dict[str, Any], where: Path) -> dict[int, AddedToken]:
    added = {number: AddedToken(text, {}, ADDED) for text, number in tokens.items() if type(number) is int}
    if len(added) < len(tokens):
        raise DataError("the tokens do not have distinct integer ids", where=str(where), fix='write {"<token>": <id>}')
    return added
