"""Processes, lanes and the ways to split a step over them."""
