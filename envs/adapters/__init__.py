"""Adapters for optional env libraries."""
