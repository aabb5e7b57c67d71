"""Complete run configuration."""

from pathlib import Path

from pydantic import Field

from offbeat.services.buffer.config import RedisConfig
from offbeat.services.control.config import ControlConfig
from offbeat.services.tinker.config import TinkerConfig
from offbeat.trainer.config.run import LearnerRunConfig


class RunConfig(LearnerRunConfig):
    """Configuration of a run; the learner's and algorithm's keys are at the root, as in ROLL."""

    exp_name: str = Field(default="offbeat", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    """Name of the run, and its id on the control service."""
    logging_dir: Path | None = None
    """Folder of the logs; None: `logs/` in `output_dir`, which otherwise links to it."""
    redis: RedisConfig = RedisConfig()
    """Redis server of the run."""
    control: ControlConfig = ControlConfig()
    """Control service: address and tokens."""
    tinker: TinkerConfig = TinkerConfig()
    """Tinker's API (`offbeat tinker`)."""
