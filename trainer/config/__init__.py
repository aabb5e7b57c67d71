"""The learner's configuration."""
