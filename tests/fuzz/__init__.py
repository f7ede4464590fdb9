"""Feeds parsers with files that others may have written: `python -m fuzz --help`, from the folder `tests`."""
