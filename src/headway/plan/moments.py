"""What optimizers keep of a parameter, and what they take for a moment to update it, in bytes."""

from __future__ import annotations

from math import prod

from headway.core.eight_bit import block_size

FP32_BYTES = 4
#: Lion's directions exist for so many elements at a time (`training/optimizer/lion.py`).
_LION_ELEMENTS = 2**25


def moment_bytes(optimizer: str, name: str, size: tuple[int, ...]) -> int:
    """State of one parameter, or of a part of it.

    Args:
        optimizer: As `optimizer.name`.
        name: Of the parameter.
        size: Of it, or of the part.
    """
    elements = prod(size)
    if optimizer == "muon":
        hidden = name.startswith("layers.") and len(size) == 2
        return FP32_BYTES * elements * (1 if hidden else 2)
    if optimizer == "lion":
        return FP32_BYTES * elements
    if optimizer == "adafactor" and len(size) > 1:
        rows, columns = elements // size[-1], elements // size[-2]
        return FP32_BYTES * (rows + columns)
    if optimizer == "adafactor":
        return FP32_BYTES * elements
    if optimizer == "adamw8bit" and (block := block_size(size)):
        return 2 * (elements + FP32_BYTES * elements // block)
    return 2 * FP32_BYTES * elements


def update_bytes(optimizer: str, updated: int, largest: int, largest_hidden: int, *, elastic: bool, cpu: bool) -> int:
    """Temporaries of an update.

    Args:
        updated: Parameters that the worker updates, in fp32.
        largest: Of them, in fp32; with `adamw8bit` of those that have moments in 8 bits.
        largest_hidden: Of their matrices between layers, in fp32.
        elastic: Whether the bits must not depend on where a matrix is cut.
    """
    if optimizer == "muon":
        # The update in fp32, three matrices in bf16 (Newton-Schulz): its argument, the last step's and the next.
        return largest_hidden * (FP32_BYTES + 3 * 2) // FP32_BYTES
    if optimizer == "lion":
        return min(updated, max(_LION_ELEMENTS * FP32_BYTES, largest))
    if optimizer == "adafactor":
        return largest
    if optimizer == "adamw8bit":
        # Compiled into one kernel on a GPU. On the CPU, as measured: copies of both moments and of the weight in fp32,
        # quotients, and what finds the codes, with indices of 8 bytes each.
        return 53 * largest // 4 if cpu else 0
    # Fused AdamW has none. On the CPU an elastic update is one operation after the other: root, denominator, quotient.
    return 2 * largest if elastic and cpu else 0
