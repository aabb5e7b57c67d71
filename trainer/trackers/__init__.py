"""Trackers of a run's metrics."""
