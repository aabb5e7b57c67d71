"""Check of tags whose env may take longer for a step than `step_timeout_s`, which ends an episode without a reward."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress

from pydantic import JsonValue, ValidationError

from offbeat.deploy.config.run import RunConfig
from offbeat.envs.dataset.code import CodeConfig
from offbeat.envs.tools.env import ToolEnvConfig
from offbeat.trainer.config.issue import ConfigIssue


def check_step_times(config: RunConfig) -> Iterator[ConfigIssue]:
    for tag, env in config.custom_envs.items():
        with suppress(ValidationError):  # reported as the env's settings
            longest_s, parts = _longest_step(env.env_type, env.env_config)
            if env.step_timeout_s <= longest_s:
                yield ConfigIssue(
                    f"custom_envs.{tag}.step_timeout_s",
                    f"{env.step_timeout_s:g} s end an episode without a reward before {parts}: take more than "
                    f"{longest_s:g}, or smaller limits",
                )


def _longest_step(env_type: str, env_config: Mapping[str, JsonValue]) -> tuple[float, str]:
    """Return the time that settings allow a step, and of what; 0 if they set none."""
    match env_type:
        case "code":
            code = CodeConfig.model_validate_json(json.dumps(env_config))
            parts = (
                f"a program's tests (max_total_s {code.max_total_s:g} + sandbox.timeout_s {code.sandbox.timeout_s:g})"
            )
            return code.max_total_s + code.sandbox.timeout_s, parts
        case "tools":
            tools = ToolEnvConfig.model_validate_json(json.dumps(env_config))
            parts = f"an answer's tool calls ({tools.calls_s:g} s, and the end of a call that fails)"
            return max((tools.longest_step_s, parts), _longest_step(tools.env_type, tools.env_config))
        case _:
            return 0.0, ""
