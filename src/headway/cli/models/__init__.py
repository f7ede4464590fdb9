"""Verbs about models: shapes, and what is done with a trained model."""
