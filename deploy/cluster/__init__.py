"""Deployed meshes."""
