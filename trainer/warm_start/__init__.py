"""Supervised fine-tuning before reinforcement learning."""
