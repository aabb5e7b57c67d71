"""Control service: run records, REST API, reconciler."""
