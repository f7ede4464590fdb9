"""Names of NumPy's array types that many signatures have."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
UInt64s = NDArray[np.uint64]
