"""One episode: env and policy in turn, and what is recorded."""
