"""Adapters for envs of other libraries, which are optional extras."""
