"""Verbs that show runs, follow them and tell of them."""
