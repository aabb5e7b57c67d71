"""The composition root: the `offbeat` command, run configurations and Serve deployments."""
