"""Episodes without Ray, GPU or Redis, run by the same code as in the mesh."""
