"""The reproducibility check that a team puts in its CI."""
