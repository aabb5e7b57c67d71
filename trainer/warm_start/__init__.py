"""Supervised fine-tuning on scripted demonstrations before reinforcement learning."""
