"""Files: atomic writes, safe readers of what others may have written, scratch folders, writes with a timeout."""
