"""Check of tags whose env may take longer for a step than `step_timeout_s`, which ends an episode without a reward."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from pydantic import JsonValue, ValidationError

from offbeat.deploy.config.run import RunConfig
from offbeat.envs.dataset.code import CodeConfig
from offbeat.envs.tools.env import ToolEnvConfig
from offbeat.trainer.config.issue import ConfigIssue


class LongestStep(NamedTuple):
    seconds: float
    cause: str
    keys: str


def check_step_times(config: RunConfig) -> Iterator[ConfigIssue]:
    for tag, env in config.custom_envs.items():
        with suppress(ValidationError):  # reported as the env's settings
            for longest in _longest_steps(env.env_type, env.env_config, "env_config"):
                if env.step_timeout_s <= longest.seconds:
                    yield ConfigIssue(
                        f"custom_envs.{tag}.step_timeout_s",
                        f"{env.step_timeout_s:g} s end an episode without a reward before {longest.cause}: take more than "
                        f"{longest.seconds:g}, or less in {longest.keys}",
                    )


def _longest_steps(env_type: str, env_config: Mapping[str, JsonValue], key: str) -> Iterator[LongestStep]:
    match env_type:
        case "code":
            code = CodeConfig.model_validate_json(json.dumps(env_config))
            cause = f"the tests of a program that is too slow for them ({code.longest_s:g} s)"
            yield LongestStep(code.longest_s, cause, f"{key}.max_total_s and {key}.sandbox.timeout_s")
        case "tools":
            tools = ToolEnvConfig.model_validate_json(json.dumps(env_config))
            end_s = tools.longest_step_s - tools.calls_s
            cause = (
                f"an answer's tool calls ({tools.calls_s:g} s{f', and {end_s:g} s after a failure' if end_s else ''})"
            )
            yield LongestStep(tools.longest_step_s, cause, f"{key}.calls_timeout_s")
            yield from _longest_steps(tools.env_type, tools.env_config, f"{key}.env_config")
        case _:
            return
