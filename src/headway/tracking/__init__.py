"""Readers of run directories for other systems: the follower with its sinks, the exporter. Nothing here is imported by
a training process.
"""
