"""Runs as Prometheus metrics."""
