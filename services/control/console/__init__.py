"""Run folders over REST, and their page."""
