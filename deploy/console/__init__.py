"""Run folders, read for the console."""
