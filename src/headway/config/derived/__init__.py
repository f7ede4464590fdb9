"""Values that follow from a config: the grid of a batch, the mesh of workers, segments, the run's identity."""
