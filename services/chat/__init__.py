"""Conversations as tokens: tokenizers, chat templates, and episodes whose calls form a tree of token sequences."""
