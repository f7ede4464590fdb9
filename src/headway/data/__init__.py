"""Text to batches: `feeding` turns a token store, which the wing `text` makes, into the batches of a step.

Doors: `store.TokenStore`, `feeding.token_feed.TokenFeed`. It imports `config` and `core` only.
"""
