"""Services that score groups by frozen models."""
