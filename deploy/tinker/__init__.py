"""Tinker's API on one machine: Redis, a learner and an HTTP server, each replaced when it dies."""
