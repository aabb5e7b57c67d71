"""Episodes driven by external agents."""
