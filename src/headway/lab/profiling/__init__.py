"""Profiling: where the time of a training step goes, what the machine can do at best, and what to change first."""
