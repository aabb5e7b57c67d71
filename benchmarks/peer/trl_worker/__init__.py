"""What runs inside TRL's venv: it knows TRL, transformers, torch and `envs`, and nothing else of Offbeat."""
