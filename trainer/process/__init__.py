"""Processes of a learner."""
