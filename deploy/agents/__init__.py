"""Example agents built on other frameworks."""
