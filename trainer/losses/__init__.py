"""Advantages, update targets and losses, as the configuration selects them."""
