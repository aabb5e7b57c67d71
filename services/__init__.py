"""The mesh: long-running services that share state through Redis and never wait for each other."""
