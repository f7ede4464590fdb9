"""Cleaning: ordered steps that change a document's text or drop it, and count what they do."""

from headway.text.clean.cleaner import Cleaner, describe_steps
from headway.text.clean.counts import CleanCounts, Example, StepCounts

__all__ = ["Cleaner", "describe_steps", "CleanCounts", "StepCounts", "Example"]
