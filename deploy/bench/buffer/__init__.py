"""`offbeat bench buffer`."""
