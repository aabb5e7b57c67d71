"""Advantages, targets and losses as configured."""
