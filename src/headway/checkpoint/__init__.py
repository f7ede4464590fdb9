"""Checkpoints: their format, saving, the remote tier, and everything that finds, keeps or moves them.

Doors: `store.CheckpointStore`, `discovery.find_latest`, `index`, `retention`, `transfer`. It imports
`config` and `core` only; it knows states as named tensors, and nothing of the rooms above.
"""
