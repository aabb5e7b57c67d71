"""Tinker's API: training and sampling of adapters, command by command."""
