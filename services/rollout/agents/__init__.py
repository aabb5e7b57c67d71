"""Episodes of external agents."""
