"""A run's configuration: composed by Hydra from YAML and overrides, validated once, strictly, as a whole."""

from pydantic import Field

from offbeat.services.buffer.config import BufferConfig, RedisConfig
from offbeat.services.control.config import ControlConfig
from offbeat.services.generation.config import GenerationConfig
from offbeat.services.live_settings import Settings
from offbeat.services.rollout.config import CustomEnv, EnvManagerConfig, RolloutConfig
from offbeat.services.weights.config import WeightsConfig
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.run import settings_of

SETTING_PATHS = {
    "num_workers": "rollout.num_workers",
    "num_replicas": "actor_infer.num_replicas",
    "learning_rate": "actor_train.training_args.learning_rate",
    "temperature": "actor_infer.generating_args.temperature",
    "max_staleness": "max_staleness",
    "num_env_groups": "train_env_manager.num_env_groups",
}
"""Where each of the run's `Settings` stands in its configuration."""


class RunConfig(LearnerConfig):
    """Everything about a run. The learner's and the algorithm's keys stand at the root, as in ROLL."""

    exp_name: str = Field(default="offbeat", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    """Names the run; also its id on the control service."""
    custom_envs: dict[str, CustomEnv]
    train_env_manager: EnvManagerConfig = EnvManagerConfig()
    val_env_manager: EnvManagerConfig = EnvManagerConfig(group_size=1)
    val_batch_size: int = Field(default=64, ge=1)
    """Episodes of one evaluation during training."""
    final_val_batch_size: int = Field(default=256, ge=1)
    """Episodes of the evaluations before and after training."""
    actor_infer: GenerationConfig = GenerationConfig()
    rollout: RolloutConfig = RolloutConfig()
    buffer: BufferConfig = BufferConfig()
    redis: RedisConfig = RedisConfig()
    weights: WeightsConfig = WeightsConfig()
    control: ControlConfig = ControlConfig()

    @property
    def settings(self) -> Settings:
        """What may be changed while the run goes on."""
        return settings_of(self, self.train_env_manager, self.rollout, self.actor_infer)
