"""Mesh on this machine."""
