"""Groups of trajectories: selection, reward shaping, replay, packing into batches."""
