"""The env-worker pool: plays episodes, many to a process, and submits them to the buffer."""
