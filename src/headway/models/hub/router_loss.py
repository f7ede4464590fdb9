"""The load-balancing loss of the routers of a model of transformers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway.core.types import IGNORE_TARGET


def balance_loss(router_logits: Sequence[torch.Tensor], targets_BT: torch.Tensor, chosen: int) -> torch.Tensor:
    """Compute the load-balancing loss (Fedus et al. 2021, equation 4), weighted by the items of each row, and summed.

    The formula for a row is that of transformers (`load_balancing_loss_func`) over all layers. It is a product of two
    means, so that over a micro-batch it would depend on which rows are computed together.

    Args:
        router_logits: Of every layer, (B * T, experts).
        targets_BT: Of the micro-batch.
        chosen: Experts that compute a token.
    """
    load_BE = importance_BE = torch.zeros((), device=targets_BT.device)
    for logits in router_logits:
        scores_BTE = torch.softmax(logits.float(), dim=-1).view(*targets_BT.shape, -1)
        routed_BTE = torch.zeros_like(scores_BTE).scatter_(2, scores_BTE.topk(chosen, dim=-1).indices, 1.0)
        load_BE = load_BE + routed_BTE.mean(1)
        importance_BE = importance_BE + scores_BTE.mean(1)
    loss_B = load_BE.shape[-1] * (load_BE * importance_BE).sum(1) / len(router_logits) ** 2
    return (loss_B * (targets_BT != IGNORE_TARGET).sum(1)).sum()
