"""Env runners."""
