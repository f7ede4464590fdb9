"""Files: atomic writes, writes with a timeout, readers of what others wrote, hashes, locks, paths, scratch folders."""
