"""Prices of machines as each cloud publishes them, one file per source."""
