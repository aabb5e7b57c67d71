"""Episodes and their recording."""
