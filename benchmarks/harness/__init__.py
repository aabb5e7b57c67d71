"""Shared parts of the benchmarks: processes, load generators, environments, results."""
