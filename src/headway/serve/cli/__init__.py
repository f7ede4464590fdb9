"""The verb of serving."""
