"""Several machines that train together: a node process on each, and the lead, which supervises all workers.

Nothing outside of the supervisor needs it.
"""
