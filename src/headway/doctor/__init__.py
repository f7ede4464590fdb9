"""What is here, what is wrong, and what to set."""
