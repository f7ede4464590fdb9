"""Experiments between two versions: which answers whom, what came of it, and when one is better."""
