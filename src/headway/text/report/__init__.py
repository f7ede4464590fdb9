"""The report on a token store: what was read, removed and kept."""
