"""Measurement scripts that `offbeat bench` does not cover: `python -m offbeat.benchmarks.studies.NAME`."""
