"""Text to batches: `reading` and `preparing` make a token store, `feeding` turns it into the batches of a step.

Doors: `store.TokenStore`, `feeding.feed.TokenFeed`, `preparing.prepare.prepare`. It imports `config` and `core` only.
"""
