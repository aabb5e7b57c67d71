"""Code in TRL's venv; imports only `envs` of Offbeat."""
