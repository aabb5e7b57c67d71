from pydantic import Field

from offbeat.envs.config import Config


class ConsoleConfig(Config):
    """Data for `/ui` and the REST routes of trajectories."""

    keep_steps: int = Field(default=16, ge=0)
    """Newest steps whose trajectories, with each token's outcome, are kept in `batches/`."""
