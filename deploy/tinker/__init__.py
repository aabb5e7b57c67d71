"""Tinker's API on one machine: Redis, a learner and an HTTP server, each supervised."""
