"""Training: state, step, loop, optimizer, schedule, health and evaluation, for any model and any feed.

Doors: `job.Job` and `Callback`, `loop.train_loop`, `task.Task`, `state.TrainState`. It knows
nothing of attempts and run directories.
"""
