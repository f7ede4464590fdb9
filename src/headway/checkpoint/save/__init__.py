"""A save: from the live state to a published checkpoint, in a writer process for each worker.

Door: `writer.CheckpointWriter`, which the training loop holds. `fence` says which attempt may publish.
"""
