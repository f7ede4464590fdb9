"""Credentials: the one redaction, secret keys, and requests that carry credentials."""
