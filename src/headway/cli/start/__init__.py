"""Verbs for the beginning: a first run, an examination of the machine, the config."""
