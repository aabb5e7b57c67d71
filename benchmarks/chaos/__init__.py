"""`offbeat chaos`: a real run under random faults, audited at its end."""
