"""Benchmarks of the real components."""
