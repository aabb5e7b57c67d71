"""Checks that need the whole run configuration."""
