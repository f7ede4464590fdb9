"""How parallelism cuts the native decoder: matrices, positions of a row, experts."""
