"""Errors that end an episode as data (`on_env_error`, `on_agent_error`)."""

from collections.abc import Mapping

from offbeat.services.errors import EpisodeError
from offbeat.services.rollout.config import CustomEnv, OnAgentError, OnEnvError

ENDED_BY_ERROR = "ended_by_error"
"""Share of episodes of such tags."""


def reward_of(rule: OnEnvError | OnAgentError | None, error: EpisodeError) -> float:
    """Return the reward of an episode that `error` ended.

    Raises:
        EpisodeError: `error`, if the rule excludes it.
    """
    if rule is None or error.reason not in rule.reasons:
        raise error
    return rule.reward


def error_metrics(env: CustomEnv, metrics: Mapping[str, float], error: EpisodeError | None) -> dict[str, float]:
    """Add whether an error ended the episode, which voids success."""
    if not (env.on_env_error or env.on_agent_error):
        return {}
    failure = {"success": 0.0} if error and "success" in metrics else {}
    return {ENDED_BY_ERROR: float(error is not None), **failure}
