"""One attempt inside a process that trains: examine, join, resume, assemble, train, record the outcome.

Doors: `preflight.examine` and `RunPlan`, `session.run_in_this_process`. `supervisor`, applications and `api` import it.
"""
