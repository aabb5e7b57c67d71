"""The control service: run records in Redis, the REST API, and the reconciler."""
