"""Verbs from text to tokens: token stores and tokenizers."""
