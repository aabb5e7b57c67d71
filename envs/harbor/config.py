"""`env_config` of `harbor`."""

from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from offbeat.envs.config import Config
from offbeat.envs.parsing import compile_pattern, fenced_pattern
from offbeat.envs.sandbox.shell import ShellLimits

FENCED = fenced_pattern("bash|sh|shell")


class HarborConfig(Config):
    tasks_dir: Path | None = None
    """Folder of task folders, or a task's; None: Offbeat's own terminal tasks."""
    val_tasks_dir: Path | None = None
    """Tasks of evaluation; None holds out one task in five."""
    tasks: tuple[str, ...] = ()
    """Names or patterns (`log-*`) of the tasks to use; empty: all."""
    unsupported: Literal["refuse", "skip"] = "refuse"
    """Tasks that need a container: refuse the configuration, or leave them out."""
    split: Literal["train", "held_out", "any"] = "train"
    """Training never uses held-out tasks."""
    max_steps: int = Field(default=30, ge=1)
    """Answers until the verifier runs; at most the tag's `max_steps`."""
    function_calling: Literal["prompt", "template"] = "prompt"
    """Commands in the answer's text, or as functions in the chat template's format."""
    action_pattern: str = FENCED
    """Regular expression of a command in an answer; the last match counts."""
    command_timeout_s: float = Field(default=20.0, gt=0)
    """Per command; all of an episode's share the task's `agent.timeout_sec`."""
    max_verifier_timeout_s: float = Field(default=600.0, gt=0)
    """Upper bound of the task's `verifier.timeout_sec`."""
    reward_key: str = "reward"
    """Of a verifier's several rewards, the one that is trained; others are metrics."""
    success_reward: float = 1.0
    """Reward from which an episode is a success."""
    format_penalty: float = Field(default=0.0, le=0)
    """Reward of an answer without a command."""
    sandbox: ShellLimits = ShellLimits()
    """Limits of an episode's shell, and the image of its container."""
    played_by: Literal["policy", "agent"] = "policy"
    """`agent`: Harbor runs the episode (`offbeat.deploy.agents.harbor_trial:play`), the env only selects the task."""
    agent: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """With `played_by: agent`: Harbor's `agent` block; `{base_url}`, `{api_key}` and `{model}` in texts are the policy's.
    Empty: Offbeat's `ShellAgent`.
    """
    environment: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """With `played_by: agent`: Harbor's `environment` block, such as `type: docker`; empty: `sandbox`."""
    trials_dir: Path | None = None
    """With `played_by: agent`: folder that keeps Harbor's trials, with their `RolloutDetail`; None keeps none."""

    @property
    def needs_shell(self) -> bool:
        """Return whether tasks run in `sandbox`."""
        return self.played_by == "policy" or not self.environment

    @model_validator(mode="after")
    def _harbors_blocks_have_an_effect(self) -> "HarborConfig":
        named = [key for key in ("agent", "environment", "trials_dir") if getattr(self, key)]
        if named and self.played_by == "policy":
            raise ValueError(f"{', '.join(named)} has no effect without played_by: agent")
        return self

    @model_validator(mode="after")
    def _network_has_an_effect(self) -> "HarborConfig":
        if self.sandbox.network != "none" and self.played_by == "agent":
            raise ValueError("sandbox.network has no effect with played_by: agent, whose trials are Harbor's")
        return self

    @field_validator("action_pattern")
    @classmethod
    def _pattern_compiles(cls, pattern: str) -> str:
        compile_pattern(pattern)
        return pattern
