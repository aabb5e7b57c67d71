"""Episodes without the mesh: no Ray, no GPU, no Redis. They are played by the code that plays them in the mesh."""
