"""The `offbeat` command line."""
