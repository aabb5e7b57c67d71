"""Reward functions by kind."""
