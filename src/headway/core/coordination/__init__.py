"""Communication between the processes of a run: heartbeats, notices, owner and lease, launch variables, outcomes."""
