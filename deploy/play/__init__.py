"""Episodes without Ray, GPU or Redis, by the mesh's code."""
