"""Complete configuration of a run."""

from pydantic import Field

from offbeat.services.buffer.config import BufferConfig, RedisConfig
from offbeat.services.control.config import ControlConfig
from offbeat.services.generation.config import GenerationConfig
from offbeat.services.live_settings import Settings, configured_settings
from offbeat.services.rollout.config import CustomEnv, EnvManagerConfig, RolloutConfig
from offbeat.services.weights.config import WeightsConfig
from offbeat.trainer.config.learner import LearnerConfig


class RunConfig(LearnerConfig):
    """Configuration of a run. The learner's and the algorithm's keys are at the root, as in ROLL."""

    exp_name: str = Field(default="offbeat", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    """Name of the run, and its id on the control service."""
    custom_envs: dict[str, CustomEnv]
    """Envs with their templates, by tag."""
    train_env_manager: EnvManagerConfig = EnvManagerConfig()
    """Training episodes: tags, groups and their size."""
    val_env_manager: EnvManagerConfig = EnvManagerConfig(group_size=1)
    """Evaluation episodes."""
    val_batch_size: int = Field(default=64, ge=1)
    """Episodes per evaluation during training."""
    final_val_batch_size: int = Field(default=256, ge=1)
    """Episodes per evaluation before and after training."""
    actor_infer: GenerationConfig = GenerationConfig()
    """Generation engines and sampling; ROLL's `actor_infer`."""
    rollout: RolloutConfig = RolloutConfig()
    """Env workers."""
    buffer: BufferConfig = BufferConfig()
    """Trajectory buffer: timeouts and retries."""
    redis: RedisConfig = RedisConfig()
    """Redis server of the run."""
    weights: WeightsConfig = WeightsConfig()
    """Transport of policy weights from the learner to the engines."""
    control: ControlConfig = ControlConfig()
    """Control service: address and tokens."""

    @property
    def settings(self) -> Settings:
        """Settings that can be changed during the run."""
        return configured_settings(self)
