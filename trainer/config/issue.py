"""One invalid key of a configuration."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConfigIssue:
    """An invalid key, with the reason and the remedy."""

    path: str
    """Full path of the key, such as `actor_train.training_args.learning_rate`; empty if the whole file is meant."""
    message: str
    """Reason and remedy."""
    hint: str | None = None
    """Full path of the nearest valid key, if the key is unknown."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message
