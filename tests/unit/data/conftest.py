"""The fixtures of `support/corpora.py`."""

from support.corpora import bars_of, config, documents, in_own_folder, jsonl, store, twenty_files

__all__ = ["bars_of", "config", "documents", "in_own_folder", "jsonl", "store", "twenty_files"]
