"""The generation service: samples tokens with vLLM on Ray Serve and takes new weights under running requests."""
