"""Seeds as a pure function of their purpose."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *purpose: int | str) -> int:
    """Derive a 63-bit seed for one purpose, e.g. ``derive_seed(seed, "dropout", step, lane, micro_batch)``.

    Hashing keeps streams of neighbouring steps unrelated, which adding small integers does not.
    """
    text = ":".join([str(seed), *map(str, purpose)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
