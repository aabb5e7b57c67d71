"""Checks of the learner's keys."""
