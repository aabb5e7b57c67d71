"""One optimizer step, its checkpoints and recorded batches."""
