"""Verbs about prices and what runs cost."""
