"""Training engines behind one protocol."""
