"""The fixtures of `support_corpora.py`."""

from support_corpora import bars_of, config, documents, in_own_folder, jsonl, store, twenty_files

__all__ = ["bars_of", "config", "documents", "in_own_folder", "jsonl", "store", "twenty_files"]
