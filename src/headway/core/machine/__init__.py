"""The resources of this machine and this process's share of them: processors, memory, and their settings."""
