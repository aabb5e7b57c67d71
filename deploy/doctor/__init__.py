"""What this machine can do, and what to do about the rest (`offbeat doctor`)."""
