"""`offbeat bench turn`: what a turn costs, by part."""
