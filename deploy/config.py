"""A run's configuration: composed by Hydra from YAML and overrides, validated once, strictly, as a whole."""

from pydantic import Field

from services.buffer.config import BufferConfig, RedisConfig
from services.control.config import ControlConfig
from services.generation.config import GenerationConfig
from services.rollout.config import CustomEnv, EnvManagerConfig, RolloutConfig
from services.weights.config import WeightsConfig
from trainer.config import LearnerConfig


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
