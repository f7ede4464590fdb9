"""Sections and checks of the decoder's variations: experts, scaled rotary embeddings, Mamba-2 and other layers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from headway.config.base import Section

#: Letters of `model.layer_pattern` (Waleffe et al. 2024, section 2.2; as in Nemotron-H).
MAMBA = "M"
ATTENTION = "*"
FEED_FORWARD = "-"
#: Letters of `model.attention_pattern`.
FULL = "F"
SLIDING = "S"
NO_ROTARY = "N"


class RopeScaling(Section):
    """Rotary frequencies for longer sequences than the model was first trained on."""

    kind: Literal["linear", "llama3", "yarn"]
    """`linear`: all frequencies divided by `factor` (Chen et al. 2023, equation 4). `llama3`: only low ones, as in
    Llama 3.1. `yarn`: those with few turns, and attention scaled (Peng et al. 2023, sections 3.2 and 3.4)."""
    factor: Annotated[float, Field(ge=1.0)]
    """Factor by which the context is extended."""
    original_length: PositiveInt | None = None
    """Length that the model was first trained on; needed by `llama3` and `yarn`."""
    low_frequency_factor: Annotated[float, Field(gt=0.0)] = 1.0
    """`llama3` divides frequencies with fewer turns than this over `original_length`."""
    high_frequency_factor: Annotated[float, Field(gt=0.0)] = 4.0
    """`llama3` keeps frequencies with more turns than this; between the two it interpolates."""
    beta_fast: Annotated[float, Field(gt=0.0)] = 32.0
    """`yarn` keeps frequencies with more turns than this over `original_length`."""
    beta_slow: Annotated[float, Field(gt=0.0)] = 1.0
    """`yarn` divides frequencies with fewer turns than this."""
    attention_factor: Annotated[float, Field(gt=0.0)] | None = None
    """`yarn` multiplies queries and keys by it; 0.1 ln(factor) + 1 when not given."""
    truncate: bool = True
    """`yarn` rounds the ends of its ramp to whole frequencies."""


class MambaConfig(Section):
    """Sizes of Mamba-2 layers (Dao & Gu 2024, section 7)."""

    heads: PositiveInt
    """Heads of a layer, each with a state of its own."""
    head_dim: PositiveInt = 64
    """Width of a head."""
    state_dim: PositiveInt = 128
    """Width of the state of each element of a head."""
    groups: PositiveInt = 8
    """Groups of heads that share their input and output vectors B and C."""
    conv_width: Annotated[int, Field(ge=2)] = 4
    """Positions that the convolution before the state space sees."""
    chunk: PositiveInt = 128
    """Positions that are computed by matrix products; states are passed between such chunks."""
    min_step: Annotated[float, Field(ge=0.0)] = 0.001
    """Smallest step of a state; also the smallest of the first steps."""
    max_step: Annotated[float, Field(gt=0.0)] = 0.1
    """Largest of the first steps, which are log-uniform."""
    conv_bias: bool = True
    """Bias of the convolution."""

    @property
    def width(self) -> int:
        """Combined width of the heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: inputs of the heads, then B and C of each group."""
        return self.width + 2 * self.groups * self.state_dim

    @property
    def projected(self) -> int:
        """Output rows of the first projection: a gate, the channels of the convolution, and a step per head."""
        return self.width + self.channels + self.heads


#: Why tensor parallelism does not divide a model whose `qk_norm` is over the projection.
UNDIVIDED_NORM = "the norms of queries and keys are over all heads, which are not divided between workers"


def pattern_layers(pattern: str, letter: str) -> list[int]:
    """Return the places of one kind of layer in a pattern."""
    return [place for place, found in enumerate(pattern) if found == letter]
