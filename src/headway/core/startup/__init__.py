"""A short start: what a process does before, or instead of, imports that take long."""
