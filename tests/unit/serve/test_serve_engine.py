"""The engine: every sequence has the tokens of `generate`, whatever else is computed with it."""

from __future__ import annotations

import queue
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.serve.engine import Drawn, Ended, Engine, Event, Sampling, Sequence
from headway.training.evaluation.generation import generate
from headway.training.evaluation.inference import TrainedModel, load_trained
from support.waits import LONG

Asked = tuple[list[int], Sampling]


@pytest.fixture(scope="module")
def trained(chat_run: Path) -> TrainedModel:
    return load_trained(chat_run)


@pytest.fixture(scope="module")
def engine(chat_run: Path) -> Iterator[Engine]:
    one = Engine(load_trained(chat_run), 8)
    one.start()
    yield one
    one.close()


def draw(engine: Engine, all_asked: list[Asked], stop_ids: frozenset[int] = frozenset()) -> list[list[int]]:
    """The tokens of sequences that are asked for at once."""
    events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
    for index, (prompt, sampling) in enumerate(all_asked):
        engine.submit(Sequence(prompt, sampling, stop_ids, lambda event, index=index: events.put((index, event))))
    tokens: list[list[int]] = [[] for _ in all_asked]
    ended = 0
    while ended < len(all_asked):
        index, event = events.get(timeout=LONG)
        if isinstance(event, Drawn):
            tokens[index].append(event.token)
        else:
            assert event.error is None
            ended += 1
    return tokens


def wanted(trained: TrainedModel, asked: Asked, stop_ids: frozenset[int] = frozenset()) -> list[int]:
    """The tokens of `generate`."""
    prompt, sampling = asked
    keys = {name: value for name, value in vars(sampling).items() if name != "top_logprobs"}
    size = trained.tokenizer.vocab_size
    return list(generate(trained.model, prompt, stop_ids=stop_ids, vocab_size=size, **keys))


def questions(number: int, temperature: float) -> list[Asked]:
    draw = random.Random(number)
    return [
        (
            [draw.randrange(300) for _ in range(draw.randrange(1, 30))],
            Sampling(draw.randrange(1, 24), temperature, draw.choice([0.9, 1.0]), draw.randrange(2**40)),
        )
        for _ in range(number)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("number", [1, 3, 20])
def test_tokens_are_those_of_generate_at_any_batch(
    trained: TrainedModel, engine: Engine, number: int, temperature: float
) -> None:
    asked = questions(number, temperature)
    assert draw(engine, asked) == [wanted(trained, one) for one in asked]


def test_a_sequence_ends_before_a_stop_token(trained: TrainedModel, engine: Engine) -> None:
    asked = ([1, 2, 3], Sampling(20, 0.0, 1.0, 0))
    whole = wanted(trained, asked)
    stops = frozenset({whole[3]})
    assert draw(engine, [asked], stops) == [wanted(trained, asked, stops)]
    assert len(wanted(trained, asked, stops)) <= 3


def test_log_probabilities_are_those_before_temperature(engine: Engine) -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    engine.submit(Sequence([5, 6], Sampling(1, 0.0, 1.0, 0, top_logprobs=3), frozenset(), events.put))
    event = events.get(timeout=LONG)
    assert isinstance(event, Drawn)
    assert event.logprob is not None
    assert event.top[0] == (event.token, pytest.approx(event.logprob))
    assert event.logprob < 0


def test_a_failing_sequence_leaves_the_others_and_the_engine(engine: Engine, trained: TrainedModel) -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    engine.submit(Sequence([10**6], Sampling(3, 0.0, 1.0, 0), frozenset(), events.put))
    event = events.get(timeout=LONG)
    assert isinstance(event, Ended)
    assert event.error is not None
    asked = questions(2, 0.0)
    assert draw(engine, asked) == [wanted(trained, one) for one in asked]


def test_a_cancelled_sequence_ends_and_the_next_one_begins(engine: Engine, trained: TrainedModel) -> None:
    sequences = [Sequence([7], Sampling(200, 0.5, 1.0, 0), frozenset(), lambda _: None) for _ in range(30)]
    for one in sequences:
        engine.submit(one)
    for one in sequences:
        one.is_cancelled = True
    asked = questions(2, 0.0)
    assert draw(engine, asked) == [wanted(trained, one) for one in asked]
