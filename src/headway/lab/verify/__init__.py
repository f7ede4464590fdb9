"""The reproducibility check, for use in CI."""
