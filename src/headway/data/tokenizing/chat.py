"""Conversations to token ids, with the tokenizer's chat template, and a mask of the tokens that are trained.

A template that marks what the assistant says (`{% generation %}`) decides what is trained. Otherwise the turns are
found by rendering the conversation message by message: a turn is what follows the prompt for it. That holds only if
every rendering is the beginning of the whole one, which is verified for each conversation. Where it is not, as in
templates that drop the thoughts of earlier turns, a turn is what the template's loop over the messages writes for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import ConfigError, DataError, HeadwayError, missing_extra
from headway.core.files.hashes import fingerprint
from headway.core.format import printable
from headway.data.tokenizing.library import UnencodableTextError, panics_as_errors
from headway.data.tokenizing.tokenizer import Tokenizer

# Version of the code's results, for the keys of stored results.
_CODE = 2
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatEncoder:
    """Renders and encodes conversations (`headway.data.reading.conversations`).

    Args:
        folder: Folder with the tokenizer and its chat template.
        tokenizer: The tokenizer in it.
        where: The file that the user gave, for messages.
        special_tokens_in_text: Let messages spell out special tokens, which then begin and end turns.

    Raises:
        ConfigError: transformers is not installed, or the tokenizer has no chat template.
        DataError: transformers cannot load the tokenizer.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, where: str, special_tokens_in_text: bool = False) -> None:
        self._tokenizer, self._where, self._special_in_text = tokenizer, where, special_tokens_in_text
        self._library = _open(folder, where)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything but the vocabulary that determines the ids of a conversation."""
        return fingerprint([_CODE, self._library.chat_template, self._library.special_tokens_map])

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Encode conversations as `encode_masked` does, without the mask."""
        ids, lengths, _ = self.encode_masked(texts)
        return ids, lengths

    def encode_masked(self, texts: Sequence[str]) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.bool_]]:
        """Encode conversations.

        Returns:
            The ids of all conversations, each with an end-of-text token at its end; the number of ids of each; and
            for each id whether it is trained.

        Raises:
            UnencodableTextError: A conversation cannot be rendered, or its assistant's turns cannot be found.
        """
        ids: list[int] = []
        trained: list[bool] = []
        lengths = []
        for text in texts:
            some, mask = self._encode(json.loads(text), text)
            if some[-1] != self._tokenizer.end_of_text_id:
                some, mask = [*some, self._tokenizer.end_of_text_id], [*mask, False]
            ids += some
            trained += mask
            lengths.append(len(some))
        return np.array(ids, self._tokenizer.dtype), np.array(lengths, np.int64), np.array(trained, np.bool_)

    def _encode(self, conversation: dict[str, Any], text: str) -> tuple[list[int], list[bool]]:
        from headway.data.tokenizing.templates import Rendering, bounded

        messages, tools = conversation["messages"], conversation.get("tools")
        if not self._special_in_text:
            # Roles are known words, which may be special tokens, and so are the names of fields.
            fields = [value for message in messages for key, value in message.items() if key != "role"]
            self._check_no_special_tokens(fields, tools)
        with self._explained():
            template = self._library.get_chat_template(None, tools)
            options = {"tools": tools, "chat_template": template}
            if _MARKS.search(template):
                options |= {"return_dict": True, "return_assistant_tokens_mask": True}
                with bounded(Rendering(len(text))):
                    found = self._library.apply_chat_template(messages, **options)
                ids, mask = found["input_ids"], [bool(bit) for bit in found["assistant_masks"]]
            else:
                whole, spans = self._spans(messages, text, options)
                found = self._library(whole, add_special_tokens=False, return_offsets_mapping=True)
                ids, mask = found["input_ids"], _overlapping(found["offset_mapping"], spans)
        if not any(mask):
            raise self._unusable("no token of it is what the assistant says, so nothing of it would be trained")
        if max(ids) >= self._tokenizer.vocab_size:
            raise self._unusable(f"transformers gives it the id {max(ids)}, which the vocabulary does not have")
        return ids, mask

    def _spans(
        self, messages: list[dict[str, Any]], text: str, options: dict[str, Any]
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation, and find the assistant's turns in it: [start, end) in characters."""
        from headway.data.tokenizing.templates import Rendering, bounded, marked_spans

        @lru_cache(4)  # not all, which could fill the memory
        def rendered(count: int, prompt: bool = False, mark: str | None = None) -> str:
            first, apply = messages[:count], self._library.apply_chat_template
            with bounded(Rendering(len(text), mark)):
                return str(apply(first, tokenize=False, add_generation_prompt=prompt, **options))

        whole, spans = rendered(len(messages)), []
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        for number in turns:
            if number == 0:
                raise self._unusable("it begins with the assistant, so where that turn begins cannot be found")
            before, after = rendered(number), rendered(number + 1) if number + 1 < len(messages) else whole
            if not (after.startswith(before) and whole.startswith(after)):
                break
            # A prompt may go further than the turn that was taken, for example into the thoughts of a model.
            begins = _common_length(rendered(number, prompt=True), whole)
            spans.append((max(len(before), min(begins, len(after))), len(after)))
        else:
            return whole, spans

        mark = next(char for char in map(chr, range(0xE000, 0xF900)) if char not in whole and char not in text)
        plain, written = marked_spans(rendered(len(messages), mark=mark), mark)
        in_order = sorted(span for found in written.values() for span in found)
        overlapping = any(one[1] > other[0] for one, other in pairwise(in_order))
        spans = []
        for turn in turns:
            before, asked, found = rendered(turn), rendered(turn, prompt=True), written.get(turn, [])
            known = plain == whole and not overlapping and len(found) == 1 and asked.startswith(before)
            start, end = found[0] if known else (0, 0)
            prompt = self._begun(asked[len(before) :], whole[start:end]) if known else None
            if prompt is None:
                raise self._unusable(
                    f"the template renders the messages up to number {number + 1} otherwise when more follow, and no"
                    f" loop of it writes message {turn + 1} alone, after its own prompt for it, so the turns cannot be"
                    " found: give a chat_template.jinja that marks what the assistant says with {% generation %}"
                )
            spans.append((start + prompt, end))
        return whole, spans

    def _begun(self, prompt: str, turn: str) -> int | None:
        """Return how much of a prompt begins a turn, up to the end of a line or a special token; None if nothing does.

        A prompt may go further than the turn that was taken, for example into the thoughts of a model.
        """
        common = _common_length(prompt, turn)
        if common == len(prompt):
            return common
        ends = [place + 1 for place, char in enumerate(prompt[:common]) if char == "\n"]
        if self._special_names is not None:
            ends += [found.end() for found in self._special_names.finditer(prompt) if found.end() <= common]
        return max(ends, default=None)

    def _check_no_special_tokens(self, *values: Any) -> None:
        found = self._special_names.search("\n".join(_strings(values))) if self._special_names is not None else None
        if found is not None:
            raise self._unusable(
                f"a message holds the special token {found.group()!r}, which could end its turn"
                " (data.tokenizer.special_tokens_in_text=true allows that)"
            )

    @cached_property
    def _special_names(self) -> re.Pattern[str] | None:
        names = sorted(filter(None, self._tokenizer.special_tokens), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names))) if names else None

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what a chat template raises for a conversation, which can be anything, into an error that names it."""
        try:
            with panics_as_errors():
                yield
        except HeadwayError:
            raise
        except Exception as error:
            reason = printable(" ".join(str(error).split()))[:200] or type(error).__name__
            raise self._unusable(f"the template cannot render it: {reason}") from None

    def _unusable(self, reason: str) -> UnencodableTextError:
        return UnencodableTextError(f"{reason} (chat template of {self._where})")


def _open(folder: Path, where: str) -> Any:
    """Load the tokenizer by transformers."""
    try:
        import jinja2  # noqa: F401
        import transformers
    except ImportError as error:
        raise missing_extra(str(error.name), "hf", "a source of conversations") from None
    transformers.utils.logging.set_verbosity_error()
    try:
        with panics_as_errors():
            library = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        what = f"transformers cannot load the tokenizer: {' '.join(str(error).split())[:300]}"
        raise DataError(what, where=where, fix="check that AutoTokenizer.from_pretrained loads it") from None
    if not library.chat_template:
        fix = "put the model's chat_template.jinja next to its tokenizer.json"
        raise ConfigError("the tokenizer has no chat template, which conversations need", where=where, fix=fix)
    return library


def _common_length(one: str, other: str) -> int:
    """Return the length of the common beginning of two texts."""
    if other.startswith(one):  # as nearly always; the loop is slow
        return len(one)
    differing = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


def _overlapping(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """Return for each token whether it overlaps a span; both are in order."""
    mask, place = [], 0
    for start, end in offsets:
        while place < len(spans) and start >= spans[place][1]:
            place += 1
        mask.append(place < len(spans) and end > spans[place][0])
    return mask


def _strings(value: Any) -> Iterator[str]:
    """Yield all texts in a value, with the names of fields, which templates write too (arguments, schemas of tools)."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
