"""Values that follow from a config, and why some configs have none: grid, mesh, experts, segments, identity."""
