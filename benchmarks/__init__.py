"""Benchmarks that a user can run: each drives the real components and reports medians and ratios from one call."""
