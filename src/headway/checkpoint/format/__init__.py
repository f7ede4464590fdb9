"""The format of a checkpoint on disk: manifest, shards, hashes, signatures, encryption. Readers and writers share it.

Doors: `manifest.Manifest` and `read_manifest`, `reading`. Nothing here writes a checkpoint.
"""
