"""The state that optimizers keep for a parameter, and the temporaries of an update, in bytes."""

from __future__ import annotations

from math import prod

from headway.core.eight_bit import block_size

FP32_BYTES = 4
#: Lion computes directions for this many elements at a time (`training/optimizer/lion.py`).
_LION_ELEMENTS = 2**25


def moment_bytes(optimizer: str, name: str, size: tuple[int, ...]) -> int:
    """Return the bytes of the optimizer state of a parameter or of a part of it.

    Args:
        optimizer: Value of `optimizer.name`.
        name: Name of the parameter.
        size: Shape of the parameter or the part.
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
    """Return the bytes of temporaries in an update.

    Args:
        updated: Bytes of the parameters that the worker updates, in fp32.
        largest: Bytes of the largest one; with `adamw8bit` of the largest with moments in 8 bits.
        largest_hidden: Bytes of the largest matrix in layers.
        elastic: Whether the bits must not depend on how a matrix is sharded.
        cpu: Whether the update runs on the CPU.
    """
    if optimizer == "muon":
        # The update in fp32, three matrices in bf16 (Newton-Schulz): its argument, the last step's and the next.
        return largest_hidden * (FP32_BYTES + 3 * 2) // FP32_BYTES
    if optimizer == "lion":
        return min(updated, max(_LION_ELEMENTS * FP32_BYTES, largest))
    if optimizer == "adafactor":
        return largest
    if optimizer == "adamw8bit":
        # One compiled kernel on a GPU. On the CPU, as measured: fp32 copies of both moments and of the weight,
        # quotients, and the search for codes with 8-byte indices.
        return 53 * largest // 4 if cpu else 0
    # Fused AdamW needs none. An elastic update on the CPU runs separate operations: root, denominator, quotient.
    return 2 * largest if elastic and cpu else 0
