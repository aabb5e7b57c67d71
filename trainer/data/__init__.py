"""Selection, shaping, replay and packing of groups."""
