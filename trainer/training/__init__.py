"""Optimizer steps, checkpoints and recorded batches."""
