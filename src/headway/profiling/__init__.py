"""Where the time of a training step goes, what the machine could do at best, and what to change first."""
