"""Configuration of the console's data."""

from pydantic import Field

from offbeat.envs.config import Config


class ConsoleConfig(Config):
    """What a run keeps for `/ui` and the REST routes of trajectories."""

    keep_steps: int = Field(default=16, ge=0)
    """Newest steps whose trajectories, with what the learner made of each token, are kept in `batches/`; 0: none."""
