"""Comparison of trained models: curves, and the evidence for a difference with its uncertainty."""
