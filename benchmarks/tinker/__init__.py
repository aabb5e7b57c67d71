"""Benchmarks of Tinker's API, by the unmodified SDK."""
