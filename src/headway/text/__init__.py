"""Sources to a token store: read, clean, deduplicate, tokenize, prepare, import. Starts without torch, knows no run."""
