"""Learner of Tinker's API: one frozen base model, an adapter for each model of a client."""
