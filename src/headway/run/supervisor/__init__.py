"""Outside the workers: start attempts, watch them, name what failed, decide what follows.

Door: `supervisor.supervise`. It trains nothing itself. `docs/rooms/supervisor.md` draws which process runs which file.
"""
