"""Activations of a native decoder whose layers differ, found by a run of it without values (`lab/plan/trace.py`)."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch

from headway.config import Config, ModelConfig
from headway.lab.plan.activations import Activations, element_bytes, loss_bytes
from headway.lab.plan.layout import Layout
from headway.lab.plan.pretrained import HALF, traced_activations
from headway.lab.plan.trace import Trace, trace_decoder
from headway.models.decoder import Decoder
from headway.models.no_values import NoFirstValues


def hybrid_activations(config: Config, model: ModelConfig, layout: Layout, device: str) -> Activations:
    """Return the activations of a layout's micro-batch on one worker; layers count as their mean."""
    precision = config.train.precision
    length = config.train.sequence_length
    assert model.vocab_size is not None and model.dim is not None
    sides = (model.vocab_size, model.dim)
    return traced_activations(
        lambda rows, mode: _traced(model.model_dump_json(), precision, (rows, length), mode),
        layout,
        loss=lambda: loss_bytes(
            sides,
            layout.micro_batch * length,
            element_bytes(precision),
            device,
            capped=model.logit_softcap is not None,
        ),
    )


@lru_cache(maxsize=16)
def _traced(dumped: str, precision: str, shape: tuple[int, int], mode: Literal["none", "selective"]) -> Trace:
    with torch.device("meta"), NoFirstValues():
        model = Decoder(ModelConfig.model_validate_json(dumped))
    return trace_decoder(model, shape, mode=mode, half=HALF.get(precision))
