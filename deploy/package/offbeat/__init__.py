"""Asynchronous reinforcement learning of LLM agents."""
