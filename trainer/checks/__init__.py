"""Checks that need only the learner's keys."""
