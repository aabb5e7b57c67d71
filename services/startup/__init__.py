"""Folder on PYTHONPATH whose `sitecustomize` runs in child processes."""
