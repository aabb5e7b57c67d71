"""Reward functions, one kind a file."""
