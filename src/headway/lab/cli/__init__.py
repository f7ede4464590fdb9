"""Verbs that predict, measure or prove what a run does."""
