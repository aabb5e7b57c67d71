"""Foreign agents that the project's own configurations play."""
