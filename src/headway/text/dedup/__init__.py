"""Deduplication of documents and paragraphs by hashes and MinHash, within limits."""

from headway.text.dedup.duplicates import Duplicates, find_duplicates
from headway.text.dedup.fingerprints import (
    DocumentPrints,
    StoredPrints,
    fingerprint_documents,
    join_prints,
    prints_recipe,
)
from headway.text.dedup.gates import TooManyDuplicates
from headway.text.dedup.paragraphs import drop_paragraphs

__all__ = [
    "Duplicates",
    "DocumentPrints",
    "StoredPrints",
    "TooManyDuplicates",
    "drop_paragraphs",
    "find_duplicates",
    "fingerprint_documents",
    "join_prints",
    "prints_recipe",
]
