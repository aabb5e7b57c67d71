"""Kernel isolation, with the standard library only."""
