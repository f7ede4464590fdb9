"""Training: state, step, loop and schedule, for any model and any feed.

In folders: `setup` before the first step, `optimizer`, `health`, `recording`, `conditions` and `evaluation`. Doors:
`job.Job` and `Callback`, `loop.train_loop`, `task.Task`, `state.TrainState`. It knows nothing of attempts and run
directories.
"""
