"""Replies of OpenAI's interface: from drawn tokens to texts that end at stop strings, and to JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.serve.engine import Drawn, Ended, Event
from headway.training.evaluation.generation import Decodes, TextStream


@dataclass(frozen=True)
class Token:
    """A token with its log probabilities, as replies show it."""

    text: str
    offset: int
    """Characters of the reply before it."""
    logprob: float
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Piece:
    """What became certain of a reply."""

    text: str
    tokens: tuple[Token, ...] = ()
    finish: str | None = None
    """`stop` or `length` at the end."""


@dataclass
class Reply:
    """One reply while it is drawn: text is held back as long as a stop string may begin in it.

    Args:
        tokenizer: Of the tokens.
        prompt: The ids that the reply continues.
        stops: Strings that end it, and are no part of it.

    Attributes:
        count: Tokens so far.
        finish: Why it has ended; None before that.
    """

    tokenizer: Decodes
    prompt: Sequence[int]
    stops: tuple[str, ...]
    count: int = 0
    finish: str | None = None
    _is_cut: bool = False
    _held: str = ""
    _given: int = 0
    _tokens: list[Token] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._text = TextStream(self.tokenizer, self.prompt)

    def take(self, event: Event) -> Piece:
        """Return what an event makes certain."""
        if isinstance(event, Ended):
            self._held += self._text.end()
            found = self._cut()
            self.finish = "stop" if found else event.reason
            return self._piece(len(self._held))
        self.count += 1
        offset = self._given + len(self._held)
        self._held += self._text.push(event.token)
        if event.logprob is not None:
            self._tokens.append(self._token(event, offset))
        if self._cut():
            self.finish = "stop"
            return self._piece(len(self._held))
        return self._piece(len(self._held) - self._doubtful())

    def _token(self, drawn: Drawn, offset: int) -> Token:
        assert drawn.logprob is not None
        top = tuple((self.tokenizer.decode([number]), logprob) for number, logprob in drawn.top)
        return Token(self.tokenizer.decode([drawn.token]), offset, drawn.logprob, top)

    def _cut(self) -> bool:
        """Cut the text at the first stop string; return whether there is one."""
        places = [place for stop in self.stops if (place := self._held.find(stop)) >= 0]
        if places:
            self._is_cut = True
            self._held = self._held[: min(places)]
        return bool(places)

    def _doubtful(self) -> int:
        """Return how many characters at the end may begin a stop string."""
        lengths = [
            length
            for stop in self.stops
            for length in range(1, min(len(stop), len(self._held) + 1))
            if self._held.endswith(stop[:length])
        ]
        return max(lengths, default=0)

    def _piece(self, length: int) -> Piece:
        """Give so many characters, and the tokens that begin in them."""
        text = self._held[:length]
        self._held = self._held[length:]
        self._given += length
        is_whole = self.finish is not None and not self._is_cut
        certain = [token for token in self._tokens if is_whole or token.offset < self._given]
        self._tokens = self._tokens[len(certain) :]
        return Piece(text, tuple(certain), self.finish)


@dataclass(frozen=True)
class Form:
    """The JSON of the replies to one request."""

    is_chat: bool
    name: str
    """The identifier of the request."""
    model: str
    created: int
    """Seconds since 1970."""
    has_logprobs: bool

    def whole(self, pieces: Sequence[Sequence[Piece]], prompt_tokens: int, tokens: int) -> dict[str, Any]:
        """Return the reply to a request that does not stream; the pieces of each choice."""
        choices = []
        for index, of_choice in enumerate(pieces):
            text = "".join(piece.text for piece in of_choice)
            drawn = [token for piece in of_choice for token in piece.tokens]
            said = (
                {"message": {"role": "assistant", "content": text, "refusal": None}} if self.is_chat else {"text": text}
            )
            finish = of_choice[-1].finish
            choices.append({"index": index, **said, "logprobs": self._logprobs(drawn), "finish_reason": finish})
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": usage(prompt_tokens, tokens)}

    def first(self, index: int) -> dict[str, Any]:
        """Return the chunk that begins a choice of chat."""
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, Piece(""))

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return a chunk of a stream."""
        if not self.is_chat:
            return self._chunk(index, {"text": piece.text}, piece)
        delta = {"content": piece.text} if piece.text or piece.tokens or piece.finish is None else {}
        return self._chunk(index, {"delta": delta}, piece)

    def last(self, prompt_tokens: int, tokens: int) -> dict[str, Any]:
        """Return the chunk with the number of tokens."""
        return {**self._chunk_head(), "choices": [], "usage": usage(prompt_tokens, tokens)}

    def _chunk(self, index: int, said: dict[str, Any], piece: Piece) -> dict[str, Any]:
        logprobs = self._logprobs(piece.tokens) if piece.tokens else None
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": piece.finish}
        return {**self._chunk_head(), "choices": [choice]}

    def _chunk_head(self) -> dict[str, Any]:
        return self._head("chat.completion.chunk" if self.is_chat else "text_completion")

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.name, "object": kind, "created": self.created, "model": self.model}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self.has_logprobs:
            return None
        if self.is_chat:
            return {"content": [self._entry(one) for one in tokens], "refusal": None}
        return {
            "tokens": [one.text for one in tokens],
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": [dict(one.top) for one in tokens],
            "text_offset": [one.offset for one in tokens],
        }

    def _entry(self, one: Token) -> dict[str, Any]:
        return {**_pair(one.text, one.logprob), "top_logprobs": [_pair(*pair) for pair in one.top]}


def _pair(text: str, logprob: float) -> dict[str, Any]:
    """Return a token with its bytes, which are unknown where it ends inside a character."""
    is_whole = "\N{REPLACEMENT CHARACTER}" not in text
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if is_whole else None}


def usage(prompt_tokens: int, tokens: int) -> dict[str, int]:
    """Return the numbers of tokens of a request."""
    return {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}
