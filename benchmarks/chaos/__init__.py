"""`offbeat chaos`: a run under random faults, audited at its end."""
