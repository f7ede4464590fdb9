"""The layers of the native decoder, and their kernels."""
