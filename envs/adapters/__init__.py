"""Envs that others wrote, each under this project's habits; the libraries are optional extras."""
