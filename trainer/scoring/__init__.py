"""Services that score groups by frozen models, beside the learner."""
