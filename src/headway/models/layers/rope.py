"""Rotary embedding: tables of angles, scaled ones for longer sequences, and the rotation.

Tensor-name suffixes: B rows, T positions, K key-value heads, G query heads per key-value head, H width of a head, R
elements of a head that are turned, F = R / 2 frequencies.
"""

from __future__ import annotations

import math

import torch

from headway.config.sections.architecture import RopeScaling


def rotary_tables(
    length: int, width: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the tables of `rotate` for positions 0 to `length`, fp32, each (length, 1, 1, width), on the CPU.

    The first half of the sines is negated: the rotation of a pair (a, b) is (a cos - b sin, b cos + a sin).
    """
    with torch.device("cpu"):
        frequencies = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
        frequencies, factor = scaled_frequencies(frequencies, theta, scaling)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)[:, None, None, :]
        cos = angles.cos()
        sin = angles.sin()
        if factor != 1.0:
            cos = cos * factor
            sin = sin * factor
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def scaled_frequencies(
    frequency_F: torch.Tensor, theta: float, scaling: RopeScaling | None
) -> tuple[torch.Tensor, float]:
    """Scale rotary frequencies for longer sequences; also return the factor of queries and keys.

    `linear`: every frequency is divided by the factor s (Chen et al. 2023, "Extending context window of large language
    models via positional interpolation", equation 4).

    `llama3`: let r be the turns of a frequency over the original length. It is divided by s where r is below the low
    factor l, kept where r is above the high factor h, and in between it is (1 - g) / s + g of itself, with
    g = (r - l) / (h - l). Meta published this as code with Llama 3.1.

    `yarn`: as above, but g falls linearly with the number of the frequency, from the one with `beta_fast` turns to the
    one with `beta_slow` turns (Peng et al. 2023, "YaRN", section 3.2, equation 13, as their code computes it). Scores
    are multiplied by the square of 0.1 ln(s) + 1 (section 3.4, equation 15).
    """
    if scaling is None:
        return frequency_F, 1.0
    factor = scaling.factor
    original = scaling.original_length or 1
    if scaling.kind == "linear":
        return frequency_F / factor, 1.0
    if scaling.kind == "llama3":
        low = scaling.low_frequency_factor
        high = scaling.high_frequency_factor
        turns_F = original * frequency_F / (2 * math.pi)
        kept_F = ((turns_F - low) / (high - low)).clamp(0, 1)
        return (1 - kept_F) * frequency_F / factor + kept_F * frequency_F, 1.0
    first, last = _yarn_ramp(scaling, 2 * len(frequency_F), theta)
    ramp_F = ((torch.arange(len(frequency_F), dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    attention = scaling.attention_factor or 0.1 * math.log(factor) + 1
    return frequency_F / factor * ramp_F + frequency_F * (1 - ramp_F), attention


def _yarn_ramp(scaling: RopeScaling, width: int, theta: float) -> tuple[float, float]:
    """Return the numbers of the frequencies between which `yarn` interpolates."""

    def number(turns: float) -> float:
        length = scaling.original_length or 1
        return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = number(scaling.beta_fast)
    last = number(scaling.beta_slow)
    if scaling.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, width - 1)
    return first, last if last != first else last + 0.001


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding (Su et al. 2021, section 3.4.2), pairing element i with i + R / 2.

    Hugging Face pairs elements in this way too, except in GLM-4, whose rows are reordered on import and export.

    Args:
        x: (B, T, K, G, H).
        cos, sin: From `rotary_tables`, (T, 1, 1, R), or (B, T, 1, 1, R) if rows have different positions. Elements of
            `x` from R on stay as they are.

    Returns:
        Shape of `x`, in the wider of the dtypes.
    """
    width = cos.shape[-1]
    if width == x.shape[-1]:
        return x * cos + x.roll(width // 2, dims=-1) * sin
    if not width:
        return x
    turned = x[..., :width]
    kept = x[..., width:]
    turned = turned * cos + turned.roll(width // 2, dims=-1) * sin
    return torch.cat((turned, kept.to(turned.dtype)), dim=-1)
