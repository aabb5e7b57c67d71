"""Composition root: `offbeat` command, run configurations, Serve deployments."""
