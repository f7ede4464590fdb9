"""Communication between the processes of an attempt: heartbeats, notices, the lease, launch variables, outcomes."""
