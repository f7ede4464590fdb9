"""Examination of a machine: what it has, what is wrong, and what to set."""
