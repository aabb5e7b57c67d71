"""Code in TRL's venv; imports `envs` alone of Offbeat."""
