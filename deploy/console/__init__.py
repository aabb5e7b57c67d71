"""A run's folder, read for the console."""
