"""Services of the mesh: long-running, asynchronous, with shared state in Redis."""
