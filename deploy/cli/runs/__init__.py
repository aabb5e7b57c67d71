"""`offbeat runs`: runs over REST."""
