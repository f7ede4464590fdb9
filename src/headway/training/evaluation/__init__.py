"""Evaluation: loss on held-out text, benchmarks, generation; and loading of trained models."""
