"""The source of a pretrained model, and what is trained of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt

from headway.config.base import LocalPath, Section
from headway.core.hub import HUB

if TYPE_CHECKING:
    pass

_HUB_PATTERN = r"^hf://[\w.-]+(/[\w.-]+)?(@[\w./-]+)?$"


def _check_hub(value: Any) -> Any:
    if isinstance(value, Path):
        value = re.sub(r"^hf:/+", HUB, str(value))
    if isinstance(value, str) and value.startswith("hf:") and not re.fullmatch(_HUB_PATTERN, value):
        raise ValueError(
            "a model of the Hugging Face Hub is named hf://organisation/name, hf://.../name@revision, or hf://gpt2"
        )
    return value


#: A folder, or a model of the Hugging Face Hub.
PretrainedSource = Annotated[
    Annotated[str, Field(pattern=_HUB_PATTERN)] | LocalPath,
    Field(union_mode="left_to_right"),
    BeforeValidator(_check_hub),
]


class AdapterConfig(Section):
    """Low-rank adapters of a pretrained model, whose own weights stay frozen; through peft
    ([continue-a-model.md](continue-a-model.md))."""

    method: Literal["lora", "rslora", "dora"] = "lora"
    """`lora` (Hu et al. 2021). `rslora`: scaled by the root of the rank (Kalajdzievski 2023). `dora`: magnitudes are
    trained too (Liu et al. 2024)."""
    rank: PositiveInt = 16
    """Width of the adapters."""
    alpha: Annotated[float, Field(gt=0.0)] = 32.0
    """Adapters are scaled by alpha / rank, with `rslora` by alpha / sqrt(rank)."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout on the input of adapters."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """Names of the layers that get adapters, such as `[q_proj, v_proj]`; `all-linear`: all linear layers but the output
    projection, and but the `out_proj` of Mamba layers that kernels read past an adapter."""
    also_trained: list[str] = []
    """Names of modules that are trained in full, such as `[embed_tokens, lm_head]`."""
    also_trained_rate: Annotated[float, Field(gt=0.0)] = 1.0
    """Learning rate of these modules, as a multiple of that of the adapters."""
    frozen_precision: Literal["auto", "fp32", "bf16", "int8", "nf4"] = "auto"
    """Type in which the matrices of frozen linear layers are kept. `auto`: the type of the matrix products, which
    changes no bit of them. `int8`: 8 bits, with a scale for each row. `nf4`: 4 bits, with a scale for 64 values (QLoRA,
    Dettmers et al. 2023)."""
