"""Learner of Tinker's API: one frozen base model, an adapter per model of a client."""
