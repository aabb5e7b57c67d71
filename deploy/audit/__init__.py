"""Exactly-once proof of a run, from its ledgers."""
