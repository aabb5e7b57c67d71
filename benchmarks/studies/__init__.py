"""Studies: `python -m offbeat.benchmarks.studies.NAME`."""
