"""What the processes of an attempt tell each other: heartbeats, notices, the lease, how it was launched and ended."""
