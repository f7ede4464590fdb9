"""From sources to a token store."""
