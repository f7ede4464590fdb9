"""Conversations to token ids, with the tokenizer's chat template, and a mask of the tokens that are trained.

A template that marks what the assistant says (`{% generation %}`) decides what is trained. Otherwise the turns are
found by rendering the conversation message by message: a turn is what follows the prompt for it. That holds only if
every rendering is the beginning of the whole one, which is verified for each conversation. Where it is not, as in
templates that drop the thoughts of earlier turns, a turn is what the template's loop over the messages writes for it.

A model learns to stop only from a trained token at which generation can stop. So each turn ends with a special token:
its own last one, without the line break after it, or the one that follows. The end-of-text token is trained where
nothing follows the last turn. A turn without any is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.arrays import Bools, Ints
from headway.core.errors import ConfigError, DataError, HeadwayError, missing_extra
from headway.core.files.hashes import fingerprint
from headway.core.format import printable
from headway.data.tokenizing.library import UnencodableTextError, panics_as_errors
from headway.data.tokenizing.tokenizer import Tokenizer

# Version of the code's results, for the keys of stored results.
_CODE = 3
_SPACE = re.compile(r"\s*")
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatEncoder:
    """Renders and encodes conversations (`headway.text.reading.conversations`).

    Args:
        folder: Folder with the tokenizer and its chat template.
        tokenizer: The tokenizer in it.
        where: The file that the user gave, for messages.
        special_tokens_in_text: Let messages spell out special tokens, which then begin and end turns.
        dated: Let the template write today's date, which a store must not depend on.

    Raises:
        ConfigError: transformers is not installed, or the tokenizer has no chat template.
        DataError: transformers cannot load the tokenizer.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        where: str,
        special_tokens_in_text: bool = False,
        dated: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._where = where
        self._special_in_text = special_tokens_in_text
        self._library = _open(folder, where)
        self._dated = dated

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything but the vocabulary that determines the ids of a conversation."""
        return fingerprint([_CODE, self._library.chat_template, self._library.special_tokens_map])

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[Any], Ints]:
        """Encode conversations as `encode_masked` does, without the mask."""
        ids, lengths, _ = self.encode_masked(texts)
        return ids, lengths

    def encode_masked(self, texts: Sequence[str]) -> tuple[NDArray[Any], Ints, Bools]:
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
            some, mask, is_open = self._encode(json.loads(text), text)
            if some[-1] != self._tokenizer.end_of_text_id:
                some = [*some, self._tokenizer.end_of_text_id]
                mask = [*mask, is_open]
            ids += some
            trained += mask
            lengths.append(len(some))
        return np.array(ids, self._tokenizer.dtype), np.array(lengths, np.int64), np.array(trained, np.bool_)

    def prompt(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Encode messages up to where the assistant answers the last one.

        Special tokens that an earlier answer spells out are left out of it.

        Raises:
            UnencodableTextError: The template cannot render them, or another message spells out a special token.
        """
        given = [
            {**message, "content": self._plain(message["content"])} if message["role"] == "assistant" else message
            for message in messages
        ]
        self._check_fields(given, None)
        with self._explained():
            characters = sum(len(message["content"]) for message in given)
            render = _Renderer(self._library, {}, characters, self._dated)
            text = render(given, add_generation_prompt=True)
            return [int(number) for number in self._library(text, add_special_tokens=False)["input_ids"]]

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The tokens at which training teaches a model to stop: those that end the turns of a conversation.

        Raises:
            UnencodableTextError: The template does not let a model learn where to stop.
        """
        turn = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Yes."}]
        conversation = {"messages": [dict(message) for message in turn * 2]}
        ids, mask, is_open = self._encode(conversation, json.dumps(conversation))
        special = set(self._tokenizer.special_tokens.values())
        ends = [place for place, (now, then) in enumerate(pairwise([*mask, False])) if now and not then]
        stops = {ids[self._last_written(ids, place)] for place in ends} & special
        if is_open:
            stops.add(self._tokenizer.end_of_text_id)
        return frozenset(stops)

    def _last_written(self, ids: list[int], place: int) -> int:
        """Return the last place, up to the given one, of a token that is not blank; -1 if all are."""
        while place >= 0 and not self._library.decode(ids[place]).strip():
            place -= 1
        return place

    def _check_fields(self, messages: list[dict[str, Any]], tools: Any) -> None:
        """Check that no message spells out a special token, unless it may."""
        if not self._special_in_text and self._special_names is not None:
            # Roles are known words, which may be special tokens, and so are the names of fields.
            fields = [value for message in messages for key, value in message.items() if key != "role"]
            found = self._special_names.search("\n".join(_strings([fields, tools])))
            if found is not None:
                raise self._unusable(
                    f"a message holds the special token {found.group()!r}, which could end its turn"
                    " (data.tokenizer.special_tokens_in_text=true allows that)"
                )

    def _encode(self, conversation: dict[str, Any], text: str) -> tuple[list[int], list[bool], bool]:
        """Return the ids of a conversation, whether each is trained, and whether the end-of-text token ends a turn."""
        messages = conversation["messages"]
        tools = conversation.get("tools")
        self._check_fields(messages, tools)
        with self._explained():
            template = self._library.get_chat_template(None, tools)
            render = _Renderer(self._library, {"tools": tools, "chat_template": template}, len(text), self._dated)
            self._check_calls_are_written(messages, render)
            if _MARKS.search(template):
                found = render(messages, return_dict=True, return_assistant_tokens_mask=True, tokenize=True)
                ids = found["input_ids"]
                mask = [bool(bit) for bit in found["assistant_masks"]]
                is_open = self._is_open(messages, ids, mask)
            else:
                whole, spans = self._spans(messages, text, render)
                spans, is_open = self._with_stops(messages, whole, spans)
                found = self._library(whole, add_special_tokens=False, return_offsets_mapping=True)
                ids = found["input_ids"]
                mask = _overlapping(found["offset_mapping"], spans)
        if not any(mask):
            raise self._unusable("no token of it is what the assistant says, so nothing of it would be trained")
        if max(ids) >= self._tokenizer.vocab_size:
            raise self._unusable(f"transformers gives it the id {max(ids)}, which the vocabulary does not have")
        return ids, mask, is_open

    def _check_calls_are_written(self, messages: list[dict[str, Any]], render: _Renderer) -> None:
        """Check that the rendering depends on the tool calls of each turn, which a template may ignore."""
        calling = [number for number in _turns(messages) if messages[number].get("tool_calls")]
        whole = render(messages) if calling else ""
        for number in calling:
            calls = messages[number]["tool_calls"]
            message = messages[number]
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            fewer = {"tool_calls": rest}
            if isinstance(calls, list) and len(calls) > 1:
                fewer["the last of the tool_calls"] = {**rest, "tool_calls": calls[:-1]}
            for ignored, other in fewer.items():
                try:
                    without = render([*messages[:number], other, *messages[number + 1 :]])
                except HeadwayError:
                    raise
                except Exception:  # a template that cannot do without the call does not ignore it
                    continue
                if without == whole:
                    outcome = "empty" if not str(message["content"]).strip() else "without them"
                    raise self._unusable(
                        f"the template ignores {ignored} of message {number + 1}, so its turn comes out {outcome}: give"
                        " a chat_template.jinja that writes them, or leave such conversations out"
                    )

    def _spans(self, messages: list[dict[str, Any]], text: str, render: _Renderer) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation, and find the assistant's turns in it: [start, end) in characters."""
        from headway.data.tokenizing.templates import marked_spans

        @lru_cache(4)  # not all, which could fill the memory
        def rendered(count: int, prompt: bool = False, mark: str | None = None) -> str:
            return str(render(messages[:count], mark, add_generation_prompt=prompt))

        whole = rendered(len(messages))
        spans = []
        turns = _turns(messages)
        for number in turns:
            before = _prefix(rendered, number)
            if before is None:
                break
            after = rendered(number + 1) if number + 1 < len(messages) else whole
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
        found_all = plain == whole and not any(one[1] > other[0] for one, other in pairwise(in_order))
        prompts = {turn: _prompt(rendered, turn, mark) for turn in turns}
        known = [prompt for prompt in prompts.values() if prompt is not None]
        shared = known[0] if known else _prompt(rendered, len(messages), mark)
        spans = []
        for turn in turns:
            found = written.get(turn, [])
            begins_at = None
            if not found_all or len(found) != 1:
                raise self._unusable(_not_found(turn))
            start, end = found[0]
            prompt = prompts[turn]
            if prompt is not None:
                begins_at = self._begun(prompt, whole[start:end])
            elif shared is not None:  # nothing that can be rendered comes before, as where the assistant is the first
                begins_at = self._begun_alike(shared, whole[start:end], whole, len(turns))
            if begins_at is None:
                raise self._unusable(_not_found(turn))
            spans.append((start + begins_at, end))
        return whole, spans

    def _with_stops(
        self, messages: list[dict[str, Any]], whole: str, spans: list[tuple[int, int]]
    ) -> tuple[list[tuple[int, int]], bool]:
        """Let each turn end with the token at which a model stops.

        Returns:
            The spans, and whether the last turn still lacks that token, since nothing follows it.
        """
        special = self._special_names
        ended = list[tuple[int, int]]()
        is_open = False
        for turn, (start, end) in zip(_turns(messages), spans, strict=True):
            said = whole[start:end].rstrip()
            if messages[turn]["content"].strip() and not self._plain(said).strip():
                raise self._unusable(
                    f"the template writes nothing of what the assistant says in message {turn + 1}, so its turn comes"
                    " out empty: give a chat_template.jinja that writes content that is a text"
                )
            own = [] if special is None else [found for found in special.finditer(said) if found.end() == len(said)]
            after = _SPACE.match(whole, end).end()  # type: ignore[union-attr]
            following = None if special is None or own else special.match(whole, after)
            continues = turn + 1 < len(messages) and messages[turn + 1]["role"] == "assistant"
            if own:
                end = start + len(said)
            elif following is not None and not continues:
                end = following.end()
            elif after < len(whole):
                raise self._unusable(
                    f"the template writes no special token after message {turn + 1}, which the assistant says, so a"
                    " model would not learn to stop there: give a chat_template.jinja that writes eos_token, or"
                    " another special token, at the end of each of the assistant's turns"
                )
            is_open = not own and after == len(whole)
            ended.append((start, end))
        return ended, is_open

    def _is_open(self, messages: list[dict[str, Any]], ids: list[int], mask: list[bool]) -> bool:
        """Return whether what a template marks ends without a token at which a model stops, since nothing follows it.

        Raises:
            UnencodableTextError: it ends without one, and more follows; or what it marks has none of the messages.
        """
        special = frozenset(self._tokenizer.special_tokens.values())
        said = (number for number, trained in zip(ids, mask, strict=True) if trained and number not in special)
        is_empty = any(mask) and not any(self._library.decode(number).strip() for number in said)
        if is_empty and any(messages[turn]["content"].strip() for turn in _turns(messages)):
            raise self._unusable(
                "the template writes nothing of what the assistant says where it marks {% generation %}"
            )
        last = max((place for place, trained in enumerate(mask) if trained), default=-1)
        last = self._last_written(ids, last)
        if last < 0 or ids[last] in special:
            return False
        if self._library.decode(ids[last + 1 :]).strip():
            raise self._unusable(
                "the last text that the template marks with {% generation %} ends without a special token, so a model"
                " would not learn to stop there: mark the token after it, too"
            )
        return True

    def _begun(self, prompt: str, turn: str) -> int | None:
        """Return how much of a prompt begins a turn, up to the end of a line or a special token; None if nothing does.

        A prompt may go further than the turn that was taken, for example into the thoughts of a model.
        """
        common = _common_length(prompt, turn)
        return max((length for length in self._lengths(prompt) if length <= common), default=None)

    def _begun_alike(self, prompt: str, turn: str, whole: str, turns: int) -> int | None:
        """Return where what begins all turns ends in one, which may have a preamble; None if that is unclear.

        Args:
            prompt: The prompt for another turn, which may go further.
            turn: What a loop writes for the message.
            whole: The conversation.
            turns: How many turns it has.
        """
        if not prompt:
            begin = self._library.bos_token
            return len(begin) if begin and turn.startswith(begin) else 0
        for length in self._lengths(prompt):
            begin = prompt[:length]
            if turn.count(begin) == 1 and whole.count(begin) == turns:
                return turn.index(begin) + length
        return None

    def _lengths(self, prompt: str) -> list[int]:
        """Return where a prompt, and each of its lines and special tokens, ends; the longest first."""
        ends = {len(prompt), *(place + 1 for place, char in enumerate(prompt) if char == "\n")}
        if self._special_names is not None:
            ends |= {found.end() for found in self._special_names.finditer(prompt)}
        return sorted(ends, reverse=True)

    def _plain(self, text: str) -> str:
        """Return a text without its special tokens."""
        return text if self._special_names is None else self._special_names.sub("", text)

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
            if "'strftime_now' is undefined" in reason:
                reason = (
                    "it writes today's date (strftime_now), and a store must not depend on the day: give a"
                    " chat_template.jinja with a date in place of strftime_now(...), for example '26 Jul 2024'"
                )
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


class _Renderer:
    """Renders messages in a bounded way.

    Args:
        library: The tokenizer as transformers has it.
        options: Arguments of every rendering.
        characters: Length of the conversation.
        dated: Whether the template may write today's date.
    """

    def __init__(self, library: Any, options: dict[str, Any], characters: int, dated: bool = False) -> None:
        self._library = library
        self._options = options
        self._characters = characters
        self._dated = dated

    def __call__(self, messages: list[dict[str, Any]], mark: str | None = None, **options: Any) -> Any:
        """Render messages, as text if the options do not say otherwise.

        Args:
            messages: The messages.
            mark: Character that marks where a loop begins and ends a message.
            options: More arguments of `apply_chat_template`.
        """
        from headway.data.tokenizing.templates import Rendering, bounded

        with bounded(Rendering(self._characters, mark, self._dated)):
            return self._library.apply_chat_template(messages, **{"tokenize": False, **self._options, **options})


def _turns(messages: list[dict[str, Any]]) -> list[int]:
    return [number for number, message in enumerate(messages) if message["role"] == "assistant"]


def _prefix(rendered: Callable[..., str], count: int) -> str | None:
    """Return how the first messages are rendered; None if they cannot be, as none can."""
    try:
        return rendered(count) if count else None
    except HeadwayError:
        raise
    except Exception:  # whatever a template raises
        return None


def _prompt(rendered: Callable[..., str], count: int, mark: str) -> str | None:
    """Return the generation prompt after some messages; None if they have none that can be told from them.

    Args:
        rendered: Renders so many messages, with or without the prompt, with or without marks of loops.
        count: The number of messages.
        mark: The mark.
    """
    from headway.data.tokenizing.templates import after_loops

    without = _prefix(rendered, count)
    if without is None:
        return None
    asked = rendered(count, True)
    if asked.startswith(without):
        return asked[len(without) :]
    # Some templates close a conversation where no prompt is asked for (Phi-3): what the loops write is equal.
    closed, _ = after_loops(rendered(count, mark=mark), mark)
    messages, prompt = after_loops(rendered(count, True, mark), mark)
    return prompt if closed == messages else None


def _not_found(turn: int) -> str:
    fix = "give a chat_template.jinja that marks what the assistant says with {% generation %}"
    if turn == 0:
        return (
            "it begins with the assistant, and no loop of the template writes that message alone, after the prompt for"
            f" it, so where the turn begins cannot be found: {fix}"
        )
    return (
        f"the template renders the messages up to number {turn + 1} otherwise when more follow, and no loop of it"
        f" writes message {turn + 1} alone, after its own prompt for it, so the turns cannot be found: {fix}"
    )


def _common_length(one: str, other: str) -> int:
    """Return the length of the common beginning of two texts."""
    if other.startswith(one):  # as nearly always; the loop is slow
        return len(one)
    differing = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


def _overlapping(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """Return for each token whether it overlaps a span; both are in order."""
    mask = []
    place = 0
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
