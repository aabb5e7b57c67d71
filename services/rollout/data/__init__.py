"""Groups of the data pipelines, read from dataset rows."""
