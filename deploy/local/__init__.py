"""Mesh of one command on this machine."""
