"""The benchmark of distributed strategies."""
