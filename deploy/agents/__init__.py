"""Agents of other frameworks, included with the project."""
