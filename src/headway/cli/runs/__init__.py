"""Verbs about runs, their checkpoints and records, and how they are watched."""
