"""Vocabularies: training them, and how well they fit a text."""
