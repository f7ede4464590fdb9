"""A run: its directory, the notices that end it, the session inside a process, the supervisor outside."""
