"""Estimates of what a run needs on given machines before anyone pays for them: memory, speed, time, energy, cost."""
