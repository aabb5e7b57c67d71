"""The seam to vLLM: engine, worker extension and weight loading."""
