"""The shape, batch and rate of a model that learns most from a given amount of compute and text.

Shapes lie on one line: a layer more is 64 more of width, as in nanochat, so depth is the only dial. Below 10 M
parameters the depth comes from a table measured by `benchmarks/first_hour/shapes.py`, above from published rules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from headway.config.optimizers import DEFAULT_OPTIMIZER
from headway.config.sections.model import ModelConfig
from headway.models.facts import count_parameters, flops_per_token

#: Training FLOPs up to which a depth learns most: the first row measured, and the others where the rule above, 20
#: tokens for each parameter, asks for the next depth with a vocabulary of 4,096.
_DEPTHS = ((6e12, 1), (2.4e14, 2), (1.1e15, 3), (3.9e15, 4), (1.2e16, 5))
#: Peak rate and tokens of a step for these depths, and their vocabulary.
_SMALL_RATE = 8e-3
_SMALL_BATCH = 2048
#: FLOPs from which Hoffmann et al. 2022 ask for 10 M parameters: 6 N D with D = 20 N.
_RULES_FROM = 1.2e16
#: Tokens for each parameter (Hoffmann et al. 2022, section 3.4).
TOKENS_PER_PARAMETER = 20
#: Passes over a text, at most: of 200 kB, 8 passes gave a loss 0.28 nats per byte below that of 16.
MOST_EPOCHS = 8
_DEEPEST = 64
#: Bytes of text from which a vocabulary of this size pays.
_VOCABULARIES = ((0, 1024), (1e6, 2048), (3e6, 4096), (5e7, 8192), (5e8, 16_384), (5e9, 32_768))


@dataclass(frozen=True)
class Choice:
    """What is trained, and how."""

    model: dict[str, Any]
    """Keys of the section `model`; empty for a model to continue, which an override names."""
    depth: int | None
    """None for a model to continue, and then the next two are 0."""
    parameters: int
    flops_per_token: float
    length: int
    """Tokens of a row."""
    batch: int
    """Tokens of a step."""
    optimizer: str
    rate: float
    """Peak learning rate."""
    most_epochs: int


def vocabulary_for(text_bytes: float) -> int:
    """Return the size of a vocabulary that is trained on so much text."""
    return next(size for least, size in reversed(_VOCABULARIES) if text_bytes >= least)


def decoder_of(depth: int) -> dict[str, Any]:
    """Return the keys of the section `model` for a depth: width 64 for each layer."""
    dim = 64 * depth
    heads = max(2, dim // (64 if depth > 3 else 32))
    return {
        "dim": dim,
        "layers": depth,
        "heads": heads,
        "kv_heads": heads,
        "ffn_dim": math.ceil(dim * 8 / 3 / 64) * 64,
        "tie_embeddings": True,
    }


def parameters_of(depth: int, vocabulary: int) -> int:
    """Count the parameters of a depth, with its embedding."""
    return count_parameters(_complete(depth, vocabulary)).total


def depth_for_size(parameters: float, vocabulary: int) -> int:
    """Return the depth whose number of parameters is nearest, by ratio."""
    return min(range(1, _DEEPEST + 1), key=lambda depth: abs(math.log(parameters_of(depth, vocabulary) / parameters)))


def depth_for(flops: float, text_tokens: float, vocabulary: int) -> int:
    """Return the depth that learns most.

    Args:
        flops: What training may take.
        text_tokens: Tokens of the text. A model has at most as many parameters as `MOST_EPOCHS` passes have tokens;
            up to that, one that would pass over the text more often is made larger.
        vocabulary: Number of token ids.
    """
    most_tokens = MOST_EPOCHS * text_tokens
    depth = depth_for_size(math.sqrt(flops / 6 / TOKENS_PER_PARAMETER), vocabulary)
    if flops < _RULES_FROM:
        depth = next(small for most, small in _DEPTHS if flops <= most)
    while depth > 1 and parameters_of(depth, vocabulary) > most_tokens:
        depth -= 1
    while depth < _DEEPEST and parameters_of(depth + 1, vocabulary) <= most_tokens:
        if flops / choice_for(depth, vocabulary, most_tokens).flops_per_token <= most_tokens:
            break
        depth += 1
    return depth


def choice_for(depth: int, vocabulary: int, tokens: float) -> Choice:
    """Return shape, batch and rate for a depth.

    Above 10 M parameters, rate and batch follow Bi et al. 2024 (DeepSeek LLM), section 3.1:
    0.3118 C^-0.1250 and 0.2920 C^0.3271 tokens, C being the training FLOPs.

    Args:
        depth: Number of layers.
        vocabulary: Number of token ids.
        tokens: Tokens that it will train on, about.
    """
    config = _complete(depth, vocabulary)
    parameters = count_parameters(config).total
    is_small = parameters < 10e6
    length = 256 if is_small else 1024
    per_token = flops_per_token(config, length)
    batch = _SMALL_BATCH
    optimizer = "muon"
    rate = _SMALL_RATE
    if not is_small:
        flops = per_token * tokens
        wanted = 0.2920 * flops**0.3271
        batch = length * max(8, 2 ** round(math.log2(wanted / length)))
        optimizer = DEFAULT_OPTIMIZER
        rate = float(f"{0.3118 * flops**-0.1250:.1e}")
    return Choice(decoder_of(depth), depth, parameters, per_token, length, batch, optimizer, rate, MOST_EPOCHS)


def continued(has_adapter: bool) -> Choice:
    """Return batch and rate for a model to continue, of all its weights or with an adapter.

    The rates are those of the presets `cpt-24gb` and `cpt-24gb-full`; passes are up to 4, after which repeated text is
    no longer nearly as good as new (Muennighoff et al. 2023, section 6).
    """
    rate = 2e-4 if has_adapter else 1e-5
    return Choice({}, None, 0, 0.0, 512, 8 * 512, DEFAULT_OPTIMIZER, rate, most_epochs=4)


def _complete(depth: int, vocabulary: int) -> ModelConfig:
    return ModelConfig.model_validate({**decoder_of(depth), "vocab_size": vocabulary})
