"""Processes, lanes and the strategies that split a step over workers."""
