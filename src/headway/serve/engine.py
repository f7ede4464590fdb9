"""Continuous batching: one thread that computes the next token of every sequence that is being answered.

Sequences enter and leave between steps (Yu et al. 2022, section 4.1). Each has a cache and a generator of random
numbers of its own, so its tokens depend on its prompt and seed alone; `headway.models.batched` keeps the bits.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from headway.core.console import warning
from headway.models.batched import BatchedSteps
from headway.training.evaluation.generation import sample

if TYPE_CHECKING:
    from headway.training.evaluation.inference import TrainedModel


#: Tokens of prompts that are computed between two steps, before the last prompt of them.
_PROMPT_TOKENS = 512


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a sequence are drawn; the fields are arguments of `generate`."""

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    top_logprobs: int | None = None
    """How many of the likeliest tokens are reported with their log probabilities; None reports none at all."""


@dataclass(frozen=True)
class Drawn:
    """A token of a sequence."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Ended:
    """The end of a sequence."""

    reason: str
    """`stop`, `length`, `error`, or `late`."""
    error: str | None = None


Event = Drawn | Ended
#: Events of one step, with what takes each.
Events = list[tuple[Callable[[Event], None], Event]]


def take_all(events: Events) -> None:
    """Hand every event to what takes it."""
    for take, event in events:
        take(event)


@dataclass
class Sequence:
    """A prompt that is continued; `emit` takes every event (`Engine.deliver`)."""

    prompt: list[int]
    sampling: Sampling
    stop_ids: frozenset[int]
    emit: Callable[[Event], None]
    is_cancelled: bool = False
    cache: Any = None
    last: int = -1
    count: int = 0
    generator: torch.Generator = field(default_factory=torch.Generator)


class Engine:
    """Continues sequences until `close`.

    Args:
        trained: The model.
        rows: The most sequences in a step; a power of two.
        exact: As for `BatchedSteps`.

    Attributes:
        steps: The batched model; None until the proof has ended.
        deliver: Is called on the engine's thread with the events of each step, all at once: to wake another thread for
            every token would cost more than the token.
    """

    def __init__(self, trained: TrainedModel, rows: int, *, exact: bool = True) -> None:
        self._trained = trained
        self._rows = rows
        self._exact = exact
        self._arrived: queue.SimpleQueue[Sequence | None] = queue.SimpleQueue()
        self._waiting: deque[Sequence] = deque()
        self._active: list[Sequence] = []
        self._failure: BaseException | None = None
        self._ready = threading.Event()
        self.steps: BatchedSteps | None = None
        self.deliver: Callable[[Events], object] = take_all
        self._events: Events = []
        self._thread = threading.Thread(target=self._run, name="headway-engine", daemon=True)

    def start(self) -> None:
        """Start the thread, and wait until the batches are proven.

        Raises:
            RuntimeError: the model cannot compute.
        """
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def is_alive(self) -> bool:
        """Whether sequences are continued."""
        return self._thread.is_alive() and self._failure is None

    def submit(self, sequence: Sequence) -> None:
        """Continue a sequence; from any thread."""
        self._arrived.put(sequence)

    def close(self) -> None:
        """End when all sequences have ended."""
        self._arrived.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            self._trained.model.eval()
            self.steps = BatchedSteps(self._trained.model, self._rows, exact=self._exact)
        except BaseException as error:
            self._failure = error
            return
        finally:
            self._ready.set()
        closing = False
        while not closing or self._active or self._waiting:
            closing |= self._take(wait=not closing and not self._active and not self._waiting)
            self._step()
            if self._events:
                events = self._events
                self._events = []
                self.deliver(events)

    def _take(self, wait: bool) -> bool:
        """Take what has arrived; return whether the engine is to close."""
        closing = False
        while True:
            try:
                sequence = self._arrived.get(block=wait)
            except queue.Empty:
                return closing
            wait = False
            if sequence is None:
                closing = True
            else:
                self._waiting.append(sequence)

    def _step(self) -> None:
        """Begin waiting sequences, at most so many that the others do not wait long, and draw a token of all."""
        self._active = [one for one in self._active if not one.is_cancelled]
        begun = 0
        while self._waiting and len(self._active) < self._rows and begun < _PROMPT_TOKENS:
            begun += len(self._waiting[0].prompt)
            self._begin(self._waiting.popleft())
        active = list(self._active)
        if not active:
            return
        with self._failing(active):
            assert self.steps is not None
            logits = self.steps.next_logits([one.last for one in active], [one.cache for one in active])
            for one, logits_V in zip(active, logits, strict=True):
                self._draw(one, logits_V)
        self._active = [one for one in active if one.cache is not None]

    def _begin(self, sequence: Sequence) -> None:
        """Compute the prompt of a sequence, and draw its first token."""
        if sequence.is_cancelled:
            return
        with self._failing([sequence]):
            assert self.steps is not None
            sampling = sequence.sampling
            sequence.generator.manual_seed(sampling.seed)
            # The same capacity as `generate` takes: the last token needs no position.
            sequence.cache = self._trained.model.new_cache(1, len(sequence.prompt) + sampling.max_new_tokens - 1)
            self._draw(sequence, self.steps.first_logits(sequence.prompt, sequence.cache))
        if sequence.cache is not None:
            self._active.append(sequence)

    @contextmanager
    def _failing(self, sequences: list[Sequence]) -> Iterator[None]:
        """End sequences whose step fails, as for lack of memory; the others and the engine continue."""
        try:
            yield
        except Exception as error:
            warning(f"{len(sequences)} of the replies failed: {error}")
            for one in sequences:
                one.cache = None
                self._emit(one, Ended("error", str(error).splitlines()[0] if str(error) else type(error).__name__))

    def _emit(self, sequence: Sequence, event: Event) -> None:
        self._events.append((sequence.emit, event))

    def _draw(self, sequence: Sequence, logits_V: torch.Tensor) -> None:
        """Draw the next token of a sequence; its cache is dropped at its end."""
        sampling = sequence.sampling
        logits_V = logits_V[: self._trained.tokenizer.vocab_size].float().cpu()
        token = sample(logits_V, sampling.temperature, sampling.top_p, sequence.generator)
        if token in sequence.stop_ids:
            sequence.cache = None
            self._emit(sequence, Ended("stop"))
            return
        sequence.last = token
        sequence.count += 1
        self._emit(sequence, _drawn(token, logits_V, sampling.top_logprobs))
        if sequence.count >= sampling.max_new_tokens:
            sequence.cache = None
            self._emit(sequence, Ended("length"))


def _drawn(token: int, logits_V: torch.Tensor, top: int | None) -> Drawn:
    """Return a token with its log probability before temperature and `top_p`, and those of the likeliest ones."""
    if top is None:
        return Drawn(token)
    logprobs_V = torch.log_softmax(logits_V, dim=0)
    best = torch.topk(logprobs_V, min(top, len(logprobs_V)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return Drawn(token, float(logprobs_V[token]), tuple(pairs))
