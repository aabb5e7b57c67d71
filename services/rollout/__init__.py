"""The env-worker pool: runs many episodes per process and submits trajectories to the buffer."""
