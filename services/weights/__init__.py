"""Weight-sync broker: names versions, moves bytes, updates late replicas."""
