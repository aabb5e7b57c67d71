from pydantic import Field

from offbeat.envs.config import Config


class WarmStartConfig(Config):
    """Supervised fine-tuning before reinforcement learning."""

    demos: str
    """`module:function` of a demonstrated episode: (env, rng) -> list of chat messages."""
    tag: str
    """Tag of `custom_envs` to demonstrate."""
    steps: int = Field(default=300, ge=1)
    """Optimizer steps."""
    episodes_per_step: int = Field(default=8, ge=1)
    learning_rate: float = Field(default=4e-3, gt=0)
    warmup_steps: int = Field(default=20, ge=0)
    weight_decay: float = Field(default=0.01, ge=0)
    """Of all weights, unless `training_args.weight_decay` exempts some."""
    final_lr_ratio: float = Field(default=0.05, ge=0, le=1)
    """Final fraction of the learning rate; linear decay over the second half."""
