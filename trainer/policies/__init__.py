"""Policies that the project can make by itself."""
