"""Sharding of the native decoder for parallelism: matrices, positions of a row, experts."""
