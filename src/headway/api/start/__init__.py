"""Begin a run: make its config from a folder of text, check it, and prepare its token store."""
