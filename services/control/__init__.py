"""Control service: run records in Redis, REST API and reconciler."""
