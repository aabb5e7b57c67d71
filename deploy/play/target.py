"""Target of `offbeat play`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from offbeat.deploy.config.checks.episodes import AGENT_IMAGES
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.run import RunConfig
from offbeat.envs import registry
from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.messages.types import EpisodeKind
from offbeat.services.rollout.config import CustomEnv
from offbeat.services.rollout.envs.runners import call_env, read_traits
from offbeat.trainer.config.issue import ConfigIssue

UNBOUNDED_TOKENS = 1_000_000
"""Without a run's configuration."""


@dataclass(frozen=True, slots=True)
class PlayTarget:
    tag: str
    env: CustomEnv
    sequence_length: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = UNBOUNDED_TOKENS
    stop_strings: tuple[str, ...] = ()
    prompt_length: int | None = None
    """Of an episode's first prompt, tokens."""
    image_input: bool | None = None

    def with_env_config(self, changes: dict[str, Any]) -> "PlayTarget":
        return replace(self, env=self.env.model_copy(update={"env_config": {**self.env.env_config, **changes}}))


def load_config(path: Path, overrides: list[str] | None = None, *, needs_env: bool = True) -> RunConfig:
    """Load a configuration and download its datasets, without checks of resources.

    Raises:
        ConfigError: with all issues.
    """
    from offbeat.deploy.config.hub_datasets import download, resolve_datasets
    from offbeat.deploy.config.loader import compose_saved, validate_tree

    tree = compose_saved(path, overrides or [])
    config = validate_tree(tree, source=str(path))
    resolved, problems = resolve_datasets(tree, download)
    if problems:
        raise ConfigError(problems, str(path))
    config = config if resolved == tree else validate_tree(resolved, source=str(path))
    problems = [
        ConfigIssue(f"custom_envs.{tag}", message)
        for tag, env in config.custom_envs.items()
        for message in registry.check_env_config(env.env_type, env.env_config)
    ]
    if needs_env and not config.custom_envs:
        problems.append(ConfigIssue("custom_envs", "no env: name at least one tag"))
    problems += [
        ConfigIssue(f"custom_envs.{tag}.agent_runner", AGENT_IMAGES)
        for tag, env in config.custom_envs.items()
        if env.shows_images and env.agent_runner
    ]
    if problems:
        raise ConfigError(problems, str(path))
    return config


def build_target(config: RunConfig, tag: str, kind: EpisodeKind = EpisodeKind.TRAIN) -> PlayTarget:
    """Return a tag's target, with the sampling of its training or of its sampled evaluations."""
    args = config.actor_infer.generating_args
    if kind is EpisodeKind.EVAL:
        args = config.val_env_manager.generating_args.for_evaluation(args)
    return PlayTarget(
        tag,
        config.custom_envs[tag],
        config.sequence_length,
        args.temperature,
        args.top_p,
        args.top_k,
        args.max_new_tokens,
        args.stop_strings,
        None if config.data is None else config.data.prompt_length,
        config.actor_train.model_args.image_input,
    )


def check_rendering(env: CustomEnv, chat: ChatFormat) -> bool:
    """Return whether the env has functions.

    Raises `RolloutError` unless the env can be made, and the chat format supports its functions and images.
    """
    if env.shows_images:
        _ = chat.image_tokens
    instance = call_env("make_error", registry.make, env.env_type, env.env_config)
    try:
        has_functions = bool(read_traits(instance).functions)
        if has_functions:
            chat.calling(env.tool_call_parser)
        return has_functions
    finally:
        instance.close()


def remove_token_limits(target: PlayTarget) -> PlayTarget:
    env = target.env.model_copy(update={"max_tokens_per_step": UNBOUNDED_TOKENS})
    return replace(
        target, env=env, sequence_length=UNBOUNDED_TOKENS, max_new_tokens=UNBOUNDED_TOKENS, prompt_length=None
    )


def find_target(
    env: str, env_config: dict[str, Any], tag: str | None, max_steps: int | None, template: str | None = None
) -> PlayTarget:
    """Return the target of an env's name, `module:Class`, or a tag of a run's file or packaged configuration.

    template: overrides `agent_template`; `{image}` renders the env.

    Raises `ConfigError`.
    """
    if _is_config(env):
        config = load_config(Path(env))
        tag = tag or next(iter(config.custom_envs))
        if tag not in config.custom_envs:
            raise ConfigError([ConfigIssue("--tag", f"no tag {tag!r}; there is {', '.join(config.custom_envs)}")], env)
        target = build_target(config, tag).with_env_config(env_config)
    else:
        if tag is not None:
            raise ConfigError(
                [ConfigIssue("--tag", f"{env} is an env, and no run's file with tags: leave it out")], env
            )
        steps = CustomEnv(env_type=env, max_steps=100, max_tokens_per_step=UNBOUNDED_TOKENS, env_config=env_config)
        target = PlayTarget(env, steps, UNBOUNDED_TOKENS)
    changes = {"max_steps": max_steps, "agent_template": template}
    changes = {key: value for key, value in changes.items() if value is not None}
    try:
        custom = CustomEnv.model_validate({**target.env.model_dump(), **changes})
    except ValidationError as error:
        raise ConfigError([ConfigIssue("--template", error.errors()[0]["msg"])], env) from error
    if custom.shows_images and "render_mode" in registry.setting_names(custom.env_type):
        custom = custom.model_copy(update={"env_config": {"render_mode": "rgb_array", **custom.env_config}})
    target = replace(target, env=custom)
    problems = registry.check_env_config(target.env.env_type, target.env.env_config)
    if problems:
        raise ConfigError([ConfigIssue("", message) for message in problems], env)
    return target


def _is_config(name: str) -> bool:
    """Return whether `name` is a file's or a packaged configuration's; envs of the same name come first."""
    from offbeat.deploy.config.loader import packaged_configs

    return name.endswith((".yaml", ".yml")) or (name in packaged_configs() and name not in registry.list_names())
