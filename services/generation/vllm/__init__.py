"""vLLM: engine, worker extension and weight loading."""
