"""Engine by transformers in the replica's own process."""
