"""Deduplication of documents and paragraphs by hashes and MinHash, within limits."""

from headway.data.dedup.duplicates import Duplicates, find_duplicates
from headway.data.dedup.fingerprints import DocumentPrints, fingerprint_documents, join_prints, prints_recipe
from headway.data.dedup.gates import TooManyDuplicates
from headway.data.dedup.paragraphs import drop_paragraphs

__all__ = [
    "Duplicates",
    "DocumentPrints",
    "TooManyDuplicates",
    "drop_paragraphs",
    "find_duplicates",
    "fingerprint_documents",
    "join_prints",
    "prints_recipe",
]
