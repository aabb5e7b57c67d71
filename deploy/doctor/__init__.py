"""Capabilities of this machine, with advice (`offbeat doctor`)."""
