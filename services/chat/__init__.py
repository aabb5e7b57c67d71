"""Conversations as tokens."""
