"""From a token store to batches: mixtures, order, rows, packing."""
