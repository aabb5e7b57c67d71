"""Long-running, asynchronous services with shared state in Redis."""
