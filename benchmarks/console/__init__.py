"""Latency and cost of the console."""
