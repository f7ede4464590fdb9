"""Verbs that start a run, on this machine or on a cluster."""
