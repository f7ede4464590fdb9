"""Searching for good keys of a config: a study is a folder with a journal, and each of its trials is a run."""
