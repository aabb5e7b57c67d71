"""Foreign agents that come with the project."""
