"""Learner: trains on groups, checkpoints and publishes weights."""
