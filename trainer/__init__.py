"""The learner: takes groups from the buffer, trains on them, checkpoints and publishes weights."""
