"""Configuration issue."""

from dataclasses import dataclass

SECRET_TABLES = ("control", "redis", "system_envs")
"""Their values are not printed: another form than expected may be a secret."""


@dataclass(frozen=True, slots=True)
class ConfigIssue:
    """An invalid key."""

    path: str
    """Full path, such as `actor_train.training_args.learning_rate`; empty for the file."""
    message: str
    """Reason and remedy."""
    hint: str | None = None
    """Full path of the nearest valid key, if unknown."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message
