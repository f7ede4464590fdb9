"""Answers from Headway's own engine."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from headway.core.errors import HeadwayError
from headway.core.random import derive_seed
from headway.serve.asking import CHOICES, Asked, RefusedRequest, parse
from headway.serve.backend import EVENTS, JSON, LATE, Answer, Call, one
from headway.serve.engine import Ended, Engine, Event, Events, Sampling, Sequence, take_all
from headway.serve.replying import Form, Piece, Reply
from headway.training.evaluation.generation import check_generation
from headway.training.evaluation.inference import TrainedModel, prompt_ids, stops_of_turns

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Tokens of a completion where the request names no number, as OpenAI has it.
_TOKENS_OF_COMPLETION = 16


@dataclass(frozen=True)
class Counted:
    """The tokens of an answer, for the server's metrics."""

    prompt: int
    drawn: int


class NativeBackend:
    """Answers from a model that Headway loads.

    Args:
        trained: The model.
        engine: Started, of the same model.
        label: The version.
        model: The name that replies show.
        max_tokens: The most tokens of a reply.
        count: Is called with the tokens of every answer.
    """

    def __init__(
        self,
        trained: TrainedModel,
        engine: Engine,
        label: str,
        *,
        model: str,
        max_tokens: int,
        count: Callable[[Counted], None],
    ) -> None:
        self.label = label
        self._trained = trained
        self._engine = engine
        self._model = model
        self._max_tokens = max_tokens
        self._count = count
        self._encoder = trained.open_chat()
        self._stops_of_turns = stops_of_turns(self._encoder)

    def is_alive(self) -> bool:
        """Return whether the engine runs."""
        return self._engine.is_alive

    def has_chat(self) -> bool:
        """Return whether there is a chat template."""
        return self._encoder is not None

    def close(self) -> None:
        """End the engine."""
        self._engine.close()

    async def answer(self, call: Call) -> Answer:
        """Answer a request."""
        default = None if call.is_chat else _TOKENS_OF_COMPLETION
        asked = parse(call.body, is_chat=call.is_chat, default_tokens=default)
        prompts = await asyncio.to_thread(self._prompts, asked)
        if len(prompts) * asked.choices > CHOICES:
            raise RefusedRequest(f"a request gets at most {CHOICES} replies", param="n", code="invalid_value")
        samplings = [self._sampling(asked, prompt) for prompt in prompts]
        self._engine.deliver = partial(_on_loop, asyncio.get_running_loop())
        form = Form(asked.is_chat, call.name, self._model, int(time.time()), asked.draws.top_logprobs is not None)
        drawing = _Drawing(self._engine, self._trained, asked, call.seconds, form=form)
        stop_ids = self._trained.stop_ids
        if asked.is_chat:
            stop_ids |= self._stops_of_turns
        begin = partial(drawing.begin, list(zip(prompts, samplings, strict=True)), stop_ids)
        if asked.streams:
            return Answer(200, EVENTS, self._counted(drawing, begin))
        try:
            begin()
            pieces = [piece async for piece in drawing.pieces()]
        finally:
            drawing.cancel()
            self._count(drawing.counted)
        if drawing.error is not None:
            raise drawing.error
        by_choice = [[piece for at, piece in pieces if at == index] for index in range(len(drawing.replies))]
        counted = drawing.counted
        body = form.whole(by_choice, counted.prompt, counted.drawn)
        return Answer(200, JSON, one(_json(body)))

    async def _counted(self, drawing: _Drawing, begin: Callable[[], None]) -> AsyncGenerator[bytes, None]:
        try:
            begin()
            async for chunk in drawing.stream():
                yield chunk
        finally:
            drawing.cancel()
            self._count(drawing.counted)

    def _prompts(self, asked: Asked) -> list[list[int]]:
        """Return the token ids of the prompts.

        Raises:
            RefusedRequest: there is no chat template, or it cannot render the messages.
        """
        if not asked.is_chat:
            with _refusing("prompt"):
                return [prompt_ids(self._trained, one) if isinstance(one, str) else list(one) for one in asked.prompts]
        if self._encoder is None:
            raise RefusedRequest(
                "the model has no chat template: ask for completions (/v1/completions)",
                param="messages",
                code="no_chat_template",
            )
        with _refusing("messages"):
            return [self._encoder.prompt(list(asked.messages))]

    def _sampling(self, asked: Asked, prompt: list[int]) -> Sampling:
        """Return how a prompt is continued, within the limits of the server and the model's positions.

        Raises:
            RefusedRequest: the prompt does not fit, or more tokens are asked for than the server gives.
        """
        draws = asked.draws
        if draws.max_tokens is not None and draws.max_tokens > self._max_tokens:
            raise RefusedRequest(
                f"a reply has at most {self._max_tokens} tokens", param="max_tokens", code="invalid_value"
            )
        wanted = draws.max_tokens or self._max_tokens
        arguments: dict[str, Any] = {"temperature": draws.temperature, "top_p": draws.top_p, "seed": draws.seed}
        with _refusing("messages" if asked.is_chat else "prompt", "context_length_exceeded"):
            room = check_generation(self._trained.model, prompt, max_new_tokens=wanted, **arguments)
        return Sampling(min(wanted, room), draws.temperature, draws.top_p, draws.seed, draws.top_logprobs)


class _Drawing:
    """The replies to one request while they are drawn.

    Args:
        engine: Draws them.
        trained: Its model.
        asked: The request.
        seconds: How long all may take.
        form: Of the chunks.

    Attributes:
        error: Why the replies ended too soon; None if they did not.
    """

    def __init__(self, engine: Engine, trained: TrainedModel, asked: Asked, seconds: float, *, form: Form) -> None:
        self._engine = engine
        self._trained = trained
        self._asked = asked
        self._form = form
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._sequences: list[Sequence] = []
        self.replies: list[Reply] = []
        self.error: RefusedRequest | None = None
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None

    @property
    def counted(self) -> Counted:
        """The tokens so far; those of a prompt count once, however many replies it gets."""
        prompts = self._sequences[:: self._asked.choices]
        return Counted(sum(len(one.prompt) for one in prompts), sum(reply.count for reply in self.replies))

    def begin(self, prompts: list[tuple[list[int], Sampling]], stop_ids: frozenset[int]) -> None:
        """Begin the replies: the first to a prompt has the seed of the request, each other one of its own."""
        late = (0, Ended("late", LATE))
        self._timer = self._loop.call_later(self._seconds, self._events.put_nowait, late)
        for prompt, sampling in prompts:
            for number in range(self._asked.choices):
                seed = sampling.seed
                if number:
                    seed = derive_seed(seed, "choice", number)
                drawn = replace(sampling, seed=seed)
                sequence = Sequence(prompt, drawn, stop_ids, self._emitter(len(self.replies)))
                self.replies.append(Reply(self._trained.tokenizer, prompt, self._asked.stops))
                self._sequences.append(sequence)
                self._engine.submit(sequence)

    def _emitter(self, index: int) -> Callable[[Event], None]:
        return lambda event: self._events.put_nowait((index, event))

    def cancel(self) -> None:
        """End the computation."""
        if self._timer is not None:
            self._timer.cancel()
        for sequence in self._sequences:
            sequence.is_cancelled = True

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yield what becomes certain, with the number of its choice, until all have ended or one has failed."""
        open_replies = len(self.replies)
        while open_replies:
            index, event = await self._events.get()
            reply = self.replies[index]
            if isinstance(event, Ended) and event.error is not None:
                status = 504 if event.reason == "late" else 500
                self.error = RefusedRequest(event.error, status)
                return
            if reply.finish is not None:  # drawn before the engine knew of the stop string
                continue
            piece = reply.take(event)
            if piece.finish is not None:
                open_replies -= 1
                self._sequences[index].is_cancelled = True
            if piece.text or piece.tokens or piece.finish is not None:
                yield index, piece

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the events of a stream."""
        if self._asked.is_chat:
            for index in range(len(self.replies)):
                yield _event(self._form.first(index))
        async for index, piece in self.pieces():
            yield _event(self._form.chunk(index, piece))
        if self.error is not None:
            yield _event(self.error.body())
            return
        if self._asked.with_usage:
            counted = self.counted
            yield _event(self._form.last(counted.prompt, counted.drawn))
        yield b"data: [DONE]\n\n"


def _on_loop(loop: asyncio.AbstractEventLoop, events: Events) -> None:
    """Hand events over on the loop's thread; a loop that has ended has nobody who waits for them."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(take_all, events)


@contextmanager
def _refusing(param: str, code: str = "invalid_value") -> Iterator[None]:
    """Turn errors of Headway's own into refusals."""
    try:
        yield
    except HeadwayError as error:
        raise RefusedRequest(error.what, param=param, code=code) from None


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _event(value: Any) -> bytes:
    return b"data: " + _json(value) + b"\n\n"
