"""Readers of run directories for other systems: the follower with its sinks, the exporter. Nothing here is imported by
a training process.

Doors: `follow.follow_all`, `track_runs.track_runs`, `sinks.check_trackers`, `process` (what the supervisor starts). A
sink is one file, made in `sinks.py`; `sink.py` has its contract.
"""
