"""The control service: run records in Redis, the REST API, and the reconciler that makes actual runs match wanted ones."""
