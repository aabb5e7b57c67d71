"""Benchmarks of the real components; each reports medians and ratios from one call."""
