"""Simulation of a run before it is paid for (`offbeat plan`)."""
