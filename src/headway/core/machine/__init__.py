"""What this machine has and what this process may use of it: processors, memory, and their settings."""
