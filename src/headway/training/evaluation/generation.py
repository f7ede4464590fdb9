"""Text generation, token by token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Protocol

import torch

from headway.core.console import warning
from headway.core.errors import ConfigError
from headway.models.decoder import Decoder
from headway.models.hub.transformers_model import TransformersModel

#: The range of seeds that PyTorch's generators accept.
_LEAST_SEED = -(2**63)
_LARGEST_SEED = 2**64 - 1
#: Below this, the likeliest token has all the probability that fp32 can represent, and quotients become infinite.
_COLDEST = 1e-20


class Decodes(Protocol):
    """The part of a tokenizer that streaming needs."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids."""
        ...


def generate(
    model: Decoder | TransformersModel,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_ids: Collection[int] = (),
    vocab_size: int | None = None,
) -> Iterator[int]:
    """Continue a prompt, one token id at a time as they are sampled.

    Each position is computed once, and its keys and values are kept (`TransformersModel.next_logits` has exceptions).
    Sampling happens on the CPU with a separate generator, so the global random state does not change.

    Args:
        model: In evaluation mode while it generates; its mode is restored at the end.
        prompt_ids: At least one token id.
        max_new_tokens: Largest number of new tokens. Generation ends earlier where the model's `max_sequence_length` is
            reached (with a warning before the first token).
        temperature: Divides the logits; 0, or a value close to it, always takes the likeliest token.
        top_p: Sample from the smallest set of likeliest tokens that has this probability (Holtzman et al. 2020,
            section 3.1).
        seed: Equal seeds give equal tokens.
        stop_ids: Generation ends before any of these tokens, which is not yielded.
        vocab_size: Number of ids of the tokenizer. The model may have more rows, which only pad its matrices; none of
            these is sampled. All rows if not given.

    Raises:
        ConfigError: an argument is out of range, or the prompt does not fit the model.
    """
    room = check_generation(
        model, prompt_ids, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed
    )
    if max_new_tokens > room:
        limit = model.config.max_sequence_length
        warning(f"the model has {limit:,} positions: generation ends after {room:,} tokens at the latest")
    new_tokens = min(max_new_tokens, room)
    generator = torch.Generator().manual_seed(seed)

    def choose(logits_V: torch.Tensor) -> int:
        return sample(logits_V[:vocab_size].float().cpu(), temperature, top_p, generator)

    return _generate(model, list(prompt_ids), new_tokens, choose, frozenset(stop_ids))


def check_generation(
    model: Decoder | TransformersModel,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> int:
    """Check the arguments of `generate`, and return how many tokens the model's positions have room for.

    Raises:
        ConfigError: an argument is out of range, or the prompt does not fit the model.
    """
    length = len(prompt_ids)
    limit = model.config.max_sequence_length
    vocabulary = model.config.vocab_size
    assert vocabulary is not None, "the config is complete"
    if not prompt_ids or min(prompt_ids) < 0 or max(prompt_ids) >= vocabulary:
        raise ConfigError(
            f"a prompt needs at least one token, all of them in the model's vocabulary of {vocabulary:,}",
            where="prompt",
            fix="use the tokenizer that the model was trained with",
        )
    if length > limit:
        raise ConfigError(
            f"the prompt has {length:,} tokens, more than the model's {limit:,} positions",
            where="prompt",
            fix="shorten the prompt",
        )
    in_range = temperature >= 0 and 0 <= top_p <= 1 and _LEAST_SEED <= seed <= _LARGEST_SEED
    if max_new_tokens < 1 or not in_range:
        raise ConfigError(
            "max_new_tokens must be at least 1, temperature at least 0, top_p between 0 and 1, and seed a number of 64"
            " bits",
            where=f"max_new_tokens={max_new_tokens}, temperature={temperature}, top_p={top_p}, seed={seed}",
            fix="choose numbers within these bounds",
        )
    # The last token is yielded without being fed back, so it needs no position.
    return limit - length + 1


def _generate(
    model: Decoder | TransformersModel,
    prompt_ids: list[int],
    new_tokens: int,
    choose: Callable[[torch.Tensor], int],
    stop_ids: frozenset[int],
) -> Iterator[int]:
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        cache = model.new_cache(1, len(prompt_ids) + new_tokens - 1)
        ids = torch.tensor([prompt_ids], device=device)
        for _ in range(new_tokens):
            with torch.no_grad():
                token = choose(model.next_logits(ids, cache)[0])  # type: ignore[arg-type]
            if token in stop_ids:
                return
            yield token
            ids = torch.tensor([[token]], device=device)
    finally:
        model.train(was_training)


def sample(logits_V: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Sample one token id from fp32 logits (V,) on the generator's device; arguments as in `generate`."""
    if temperature < _COLDEST:
        return int(logits_V.argmax())
    probabilities_V = torch.softmax(logits_V / temperature, dim=0)
    if top_p < 1:
        sorted_V, order_V = probabilities_V.sort(descending=True, stable=True)
        # A token is in the set while those before it have not reached top_p; the likeliest always is.
        reached_V = sorted_V.cumsum(0) - sorted_V >= top_p
        reached_V[0] = False
        sorted_V[reached_V] = 0.0
        probabilities_V = torch.zeros_like(probabilities_V).scatter_(0, order_V, sorted_V)
    return int(torch.multinomial(probabilities_V, 1, generator=generator))


class TextStream:
    """Decodes a stream of token ids into text, in pieces as soon as they are certain.

    A token may end inside a character of several bytes; such a piece waits for the tokens that complete it. Every piece
    is decoded together with the one before it, since some tokenizers treat the first token of a text specially.

    Args:
        tokenizer: Of the tokens.
        after: The ids that the stream continues; their text is not returned.
    """

    def __init__(self, tokenizer: Decodes, after: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._seen = list(after)
        self._given = len(self._seen)
        self._start = 0

    def push(self, token: int) -> str:
        """Return the text that a token completes."""
        self._seen.append(token)
        before = self._tokenizer.decode(self._seen[self._start : self._given])
        now = self._tokenizer.decode(self._seen[self._start :])
        if len(now) <= len(before) or now.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._start = self._given
        self._given = len(self._seen)
        return now[len(before) :]

    def end(self) -> str:
        """Return the text that is left."""
        before = self._tokenizer.decode(self._seen[self._start : self._given])
        return self._tokenizer.decode(self._seen[self._start :])[len(before) :]


def stream_text(tokenizer: Decodes, ids: Iterable[int], after: Sequence[int] = ()) -> Iterator[str]:
    """Decode a stream of token ids into pieces of text; arguments as for `TextStream`."""
    text = TextStream(tokenizer, after)
    for token in ids:
        if piece := text.push(token):
            yield piece
    if rest := text.end():
        yield rest
