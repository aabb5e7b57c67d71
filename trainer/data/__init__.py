"""Selection, reward shaping, replay and packing of groups of trajectories."""
