"""Verbs from text to tokens: token stores and tokenizers."""

import os

# Nothing here multiplies matrices, and NumPy's idle threads would spin and slow down the others. The first import of
# NumPy, by a module of this package, reads it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
