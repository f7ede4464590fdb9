"""When a run on spot machines pauses and grows, and what that would have saved."""
