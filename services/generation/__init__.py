"""The generation service: vLLM on Ray Serve, with weight updates under running requests."""
