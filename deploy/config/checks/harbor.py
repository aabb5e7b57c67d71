"""Checks of tags whose episodes end with a task's verifier."""

import json
from collections.abc import Iterator
from contextlib import suppress

from pydantic import ValidationError

from offbeat.deploy.config.run import RunConfig
from offbeat.envs.harbor.config import HarborConfig
from offbeat.envs.harbor.task_set import load_split
from offbeat.services.rollout.config import CustomEnv
from offbeat.trainer.config.issue import ConfigIssue


def check_harbor(config: RunConfig) -> Iterator[ConfigIssue]:
    for tag, env in config.custom_envs.items():
        if env.env_type == "harbor":
            with suppress(ValidationError):  # reported as the env's settings
                settings = HarborConfig.model_validate_json(json.dumps(env.env_config))
                yield from _check_limits(f"custom_envs.{tag}", env, settings)


def _check_limits(key: str, env: CustomEnv, settings: HarborConfig) -> Iterator[ConfigIssue]:
    """Yield limits of the tag that cut an episode before its verifier has ended."""
    if settings.played_by == "agent":
        return
    if env.max_steps < settings.max_steps:
        yield ConfigIssue(
            f"{key}.max_steps",
            f"{env.max_steps} answers end an episode before its verifier, which runs after env_config.max_steps, "
            f"{settings.max_steps}: take {settings.max_steps}, or a smaller env_config.max_steps",
        )
    verifier_s = _longest_verifier_s(settings)
    if env.step_timeout_s <= settings.command_timeout_s + verifier_s:
        yield ConfigIssue(
            f"{key}.step_timeout_s",
            f"{env.step_timeout_s:g} s end a step of a command ({settings.command_timeout_s:g} s) and a verifier "
            f"({verifier_s:g} s): take more than {settings.command_timeout_s + verifier_s:g}, or a smaller "
            "env_config.command_timeout_s or max_verifier_timeout_s",
        )


def _longest_verifier_s(settings: HarborConfig) -> float:
    """Return the longest time of a task's verifier, evaluation included; 0 if no task can be read."""
    timeouts_s = [0.0]
    for split in {settings.split, "held_out"}:
        with suppress(ValueError):  # reported by the env's trial
            tasks = load_split(settings.model_copy(update={"split": split}))
            timeouts_s += [step.verifier_timeout_s for task in tasks for step in task.steps]
    return min(max(timeouts_s), settings.max_verifier_timeout_s)
