"""Part of a run's configuration that its learner reads: training, and what it needs of the other services."""

from collections.abc import Mapping

from pydantic import Field

from offbeat.services.buffer.config import BufferConfig
from offbeat.services.generation.config import GenerationConfig
from offbeat.services.live_settings import Settings, configured_settings
from offbeat.services.rollout.config import CustomEnv, EnvManagerConfig, RolloutConfig
from offbeat.services.weights.config import WeightsConfig
from offbeat.trainer.config.learner import LearnerConfig


class LearnerRunConfig(LearnerConfig):
    """Configuration of a run as its learner sees it; `RunConfig` adds what only other services read."""

    custom_envs: dict[str, CustomEnv]
    """Envs with their templates, by tag."""
    train_env_manager: EnvManagerConfig = EnvManagerConfig()
    """Training episodes: tags, groups and their size."""
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
    weights: WeightsConfig = WeightsConfig()
    """Transport of policy weights from the learner to the engines."""

    @property
    def groups_per_step(self) -> int:
        return self.rollout_batch_size // self.train_env_manager.group_size

    @property
    def adapter_settings(self) -> Mapping[str, object] | None:
        """PEFT settings of the published adapter that engines need, or None if merged weights are published."""
        args = self.actor_train.model_args
        if self.actor_infer.max_lora_rank is None:
            return None
        kind = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none"}
        return {**kind, "r": args.lora_rank, "lora_alpha": args.adapter_alpha, "target_modules": args.lora_targets}

    @property
    def temperature(self) -> float:
        """Sampling temperature of training trajectories, unless their group overrides it."""
        return self.actor_infer.generating_args.temperature

    @property
    def settings(self) -> Settings:
        """Configured values of the live settings."""
        return configured_settings(self)
