"""The env-worker pool."""
