"""Code that runs in TRL's venv; imports TRL, transformers, torch and `envs`, and nothing else of Offbeat."""
