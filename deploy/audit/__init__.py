"""Exactly-once proof of a run, from its ledgers on disk and in Redis."""
