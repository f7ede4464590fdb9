"""What is recorded of steps: metrics, times of communication and copies."""
