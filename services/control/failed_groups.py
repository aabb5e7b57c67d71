from collections.abc import Mapping

POLICY_CAUSED = {
    "step_error": "on_env_error",
    "step_timeout": "on_env_error",
    "env_crashed": "on_env_error",
    "agent_error": "on_agent_error",
    "agent_result": "on_agent_error",
    "agent_timeout": "on_agent_error",
    "agent_crashed": "on_agent_error",
}
"""Reasons caused by a policy's answers, and keys of `custom_envs` that train them."""


def describe_failed(failed: Mapping[str, int]) -> str:
    return f"{sum(failed.values())} ({', '.join(f'{reason} {count}' for reason, count in failed.items())})"


def advise_failed(failed: Mapping[str, int]) -> str:
    """Return a clause with the keys to set."""
    keys = sorted({key for reason in failed if (key := POLICY_CAUSED.get(reason))})
    advice = f"; if the policy's answers cause it, set {' and '.join(keys)} of the tag, so that it learns from them"
    cause = "an episode of each failed at every attempt with its seed, so none is trained"
    text = f"failed groups {describe_failed(failed)}: {cause}"
    return text + (advice if keys else "")
