"""Simulation of a run before its start (`offbeat plan`)."""
