"""`offbeat runs`: starting, steering and watching runs over REST."""
