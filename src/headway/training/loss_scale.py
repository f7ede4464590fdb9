"""Dynamic loss scaling for fp16, as a part of the cursor: the next scale follows from the current one.

Gradients of fp16 activations would vanish below 2^-24. So the loss is multiplied by a scale, and gradients are divided
by it in fp32. A scale that makes gradients overflow is halved, one that has not done so for long is doubled
(Micikevicius et al. 2018, "Mixed precision training", section 3.2). Scales are powers of two: no bit of a gradient that
is in range depends on them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.training.state import Cursor

#: Losses are sums over the items of a micro-batch, not means, so scales are smaller than elsewhere.
FIRST, LEAST, MOST = 2**10, 1, 2**15
GROWTH_INTERVAL = 2000
"""Steps without an overflow after which the scale is doubled."""


def begin_scaling(cursor: Cursor, precision: str) -> None:
    """Give a cursor the initial scale if the precision needs one and it has none; remove it if not needed."""
    if precision != "fp16":
        cursor.loss_scale, cursor.steps_at_scale = None, 0
    elif cursor.loss_scale is None:
        cursor.loss_scale, cursor.steps_at_scale = FIRST, 0


def update_scale(cursor: Cursor, overflow: bool) -> bool:
    """Update the scale after a step.

    Args:
        overflow: The loss was finite and its gradient was not.

    Returns:
        Whether the scale explains the overflow, so that it says nothing about the run: a smaller scale was possible.
    """
    if cursor.loss_scale is None:
        return False
    explained = overflow and cursor.loss_scale > LEAST
    cursor.steps_at_scale += 1
    if overflow:
        cursor.loss_scale, cursor.steps_at_scale = max(LEAST, cursor.loss_scale // 2), 0
    elif cursor.steps_at_scale >= GROWTH_INTERVAL:
        cursor.loss_scale, cursor.steps_at_scale = min(MOST, cursor.loss_scale * 2), 0
    return explained
