"""Sections of a config, one file each; the small ones stand beside `Config` in `schema.py`."""
