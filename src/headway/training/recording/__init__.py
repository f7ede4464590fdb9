"""Recording of steps: metrics, times of communication and copies."""
