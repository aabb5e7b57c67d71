"""Folder that `torch_extensions` puts on PYTHONPATH, so that Python runs its `sitecustomize` in child processes."""
