"""Rendering of evaluation episodes."""
