"""Checks of a config: contradictions between sections, credentials, and settings without effect."""
