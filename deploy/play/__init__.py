"""Episodes without Ray, GPU or Redis."""
