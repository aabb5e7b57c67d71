"""Learner configuration."""
