"""Deployed meshes: Serve applications, run factories and engine matching."""
