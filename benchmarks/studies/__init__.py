"""Measurement scripts beyond `offbeat bench`: `python -m offbeat.benchmarks.studies.NAME`."""
