"""Sections of a config, one file each; `schema.py` has those of the model, the optimizer and the run itself."""
