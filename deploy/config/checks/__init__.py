"""Checks across the configuration."""
