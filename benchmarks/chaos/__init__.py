"""`offbeat chaos`: a real run whose processes are killed and stopped at random moments, and what it leaves, audited."""
