"""What a run will need and do on machines that nobody has paid for yet: memory, speed, time, energy, cost."""
