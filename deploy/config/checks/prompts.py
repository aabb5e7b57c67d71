"""Checks of the chat template and first prompts' lengths."""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from jinja2 import TemplateError

from offbeat.deploy.config.checks.trials import TrialError, refuse_failures, try_envs
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.vocabulary import MissingWordsError, collect_words
from offbeat.envs import registry
from offbeat.envs.prompts import IMAGE, ROW_IMAGE, fill_template
from offbeat.services.chat.messages import ChatMessage
from offbeat.services.chat.template_override import write_policy_folder
from offbeat.services.errors import RolloutError
from offbeat.services.rollout.config import CustomEnv
from offbeat.services.rollout.envs.runners import EnvTraits, read_traits, render_png
from offbeat.services.rollout.envs.trial import Trial
from offbeat.trainer.config.issue import ConfigIssue

CountTokens = Callable[["FirstTexts", CustomEnv], int]
"""Token counter of a first prompt; raises RolloutError if rendering fails."""


OnStep = Callable[[str, str], None]
"""Observer of checks with user code: key and action."""


def ignore_step(key: str, doing: str) -> None:
    """Observe nothing."""


class FirstTexts(NamedTuple):
    system: str
    observation: str
    png: bytes
    """PNG image, or empty."""
    functions: tuple[Mapping[str, Any], ...]
    """JSON schemas of the env's functions."""
    seats: tuple[str, ...] = ()
    """Seats that the policy plays, if several."""


class BrokenTokenizerError(Exception):
    """Unreadable `tokenizer.json`."""


def check_first_prompts(config: RunConfig, on_step: OnStep = ignore_step, *, trial: bool = True) -> list[ConfigIssue]:
    """Check the chat template and first prompts. trial: run foreign envs in processes, also their steps."""
    return check_with_template(config, lambda replaced: _check_prompts(replaced, on_step, trial=trial))


def check_with_template(config: RunConfig, check: Callable[[RunConfig], Iterable[ConfigIssue]]) -> list[ConfigIssue]:
    """Run a check of `pretrain` with `chat_template` in place of the model's; issues of the template have its key."""
    if config.chat_template is None:
        return list(check(config))
    with TemporaryDirectory() as folder:
        try:
            write_policy_folder(Path(config.pretrain), Path(folder), config.chat_template)
            issues = list(check(config.model_copy(update={"pretrain": folder, "chat_template": None})))
        except (RolloutError, OSError, UnicodeDecodeError) as error:
            return [ConfigIssue("chat_template", str(error))]
        except TemplateError as error:
            return [ConfigIssue("chat_template", f"can't be rendered: {error}")]
    key = {"pretrain": "chat_template"}
    return [ConfigIssue(key.get(i.path, i.path), i.message.replace(folder, config.pretrain)) for i in issues]


def _check_prompts(config: RunConfig, on_step: OnStep, *, trial: bool) -> list[ConfigIssue]:
    on_step("custom_envs", "reading the envs' vocabulary, chat template and tokenizer")
    try:
        count_tokens = _count_tokens(config)
    except (MissingWordsError, BrokenTokenizerError, RolloutError) as error:
        return [ConfigIssue("pretrain", str(error))]
    issues = [*_check_template(config), *_check_parser(config)]
    trials = try_envs(config) if trial else {}
    for tag, env in config.custom_envs.items():
        on_step(f"custom_envs.{tag}.env_type", f"making and resetting {env.env_type}")
        try:
            texts = _texts_of_trial(env, trials[tag]) if tag in trials else _first_texts(env, config.seed)
        except Exception as error:  # a user's env may raise anything
            message = (
                str(error) if isinstance(error, TrialError) else f"can't be reset: {type(error).__name__}: {error}"
            )
            issues.append(ConfigIssue(f"custom_envs.{tag}.env_type", f"{env.env_type} {message}"))
            continue
        try:
            length = count_tokens(texts, env)
            issues += _check_function(config, tag, texts)
        except RolloutError as error:
            key = "agent_template" if env.shows_images else "agent_system_template"
            key = "tool_call_parser" if texts.functions else key
            issues.append(ConfigIssue(f"custom_envs.{tag}.{key}", str(error)))
            continue
        if length >= config.sequence_length:
            message = (
                f"{config.sequence_length} tokens leave no room for an answer: the first prompt of {tag} has at least "
                f"{length}; take more than {length + env.max_tokens_per_step}"
            )
            issues.append(ConfigIssue("sequence_length", message))
    return issues


def _check_function(config: RunConfig, tag: str, texts: FirstTexts) -> Iterator[ConfigIssue]:
    env = config.custom_envs[tag]
    if env.tool_call_parser and not texts.functions:
        message = f"{env.env_type} offers no functions: leave it out, or set env_config.function_calling to template"
        yield ConfigIssue(f"custom_envs.{tag}.tool_call_parser", message)
    scored = [] if config.scoring is None else config.scoring.of_tag(tag)
    if scored and texts.seats:
        message = (
            f"reward {scored[0].name!r} scores one conversation, and {tag} has one of each seat, {', '.join(texts.seats)}: "
            "name other tags, or let the env reward seats"
        )
        yield ConfigIssue("rewards", message)
    if env.agent_runner and texts.seats:
        message = (
            f"an agent plays one seat: leave one of {', '.join(texts.seats)} to the policy, the others to opponents"
        )
        yield ConfigIssue(f"custom_envs.{tag}.agent_runner", message)
    if not texts.functions:
        return
    if env.agent_runner:
        yield ConfigIssue(
            f"custom_envs.{tag}.agent_runner", "an agent has tools of its own: take function_calling: prompt"
        )
    if env.env_manager_cls != "TrajEnvManager":
        message = "a call and its result need one conversation: take TrajEnvManager, or function_calling: prompt"
        yield ConfigIssue(f"custom_envs.{tag}.env_manager_cls", message)
    if env.shows_images:
        yield ConfigIssue(f"custom_envs.{tag}.agent_template", "functions do not support images: leave {image} out")
    if config.warm_start is not None and config.warm_start.tag == tag:
        yield ConfigIssue(
            "warm_start.tag", f"demonstrations can't call functions, which {tag} offers: leave warm_start out"
        )


def _check_parser(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield parsers missing in vLLM or unfit for the tokenizer."""
    for tag, env in config.custom_envs.items():
        name = env.agent_runner.tool_call_parser if env.agent_runner else None
        if name is None:
            continue
        key = f"custom_envs.{tag}.agent_runner.tool_call_parser"
        if config.pretrain == "tiny":
            yield ConfigIssue(key, "the tiny policy's template has no tools: leave it out")
            continue
        from offbeat.services.rollout.agents.episode import load_agent_template

        try:
            load_agent_template(Path(config.pretrain), name)
        except RolloutError as error:
            yield ConfigIssue(key, str(error))


def _check_template(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield features that need an append-only template."""
    if config.pretrain == "tiny":
        return
    from offbeat.services.chat.append_only import load_chat_format

    if not (reason := load_chat_format(Path(config.pretrain)).rewrites):
        return
    if config.warm_start is not None:
        yield ConfigIssue("warm_start", f"demonstrations are one sequence each: {reason}")
    for tag, env in config.custom_envs.items():
        if env.shows_images and env.env_manager_cls == "TrajEnvManager":
            yield ConfigIssue(f"custom_envs.{tag}.env_manager_cls", f"take StepEnvManager for images: {reason}")


def _count_tokens(config: RunConfig) -> CountTokens:
    from tokenizers import Tokenizer

    if config.pretrain == "tiny":
        from offbeat.trainer.models.tiny import build_tokenizer

        tokenizer = build_tokenizer(collect_words(config))

        def count_tiny(texts: FirstTexts, _: CustomEnv) -> int:
            if texts.functions:
                raise RolloutError("the tiny policy's chat template has no functions: take function_calling: prompt")
            words = sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts[:2])
            png = texts.png
            return words + (
                count_tiny_image_tokens(png, config.tiny.vision.patch_size) if png and config.tiny.vision else 0
            )

        return count_tiny
    path = Path(config.pretrain) / "tokenizer.json"
    if path.is_file():
        try:
            Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain `Exception`s
            raise BrokenTokenizerError(f"{path} is not a valid tokenizer: {error}") from error
    from offbeat.services.chat.tool_templates import load_playing_format

    chat = load_playing_format(Path(config.pretrain))

    def count(texts: FirstTexts, env: CustomEnv) -> int:
        images = chat.image_tokens.reader.count(texts.png) * texts.observation.count(IMAGE) if texts.png else 0
        if texts.functions:
            template, messages = chat.calling(env.tool_call_parser), [ChatMessage("user", texts.observation)]
            if texts.system:
                messages.insert(0, ChatMessage("system", texts.system))
            return len(template.encode(template.render(messages, texts.functions, prompt=True)))
        return len(chat.first_prompt(texts.system, texts.observation)) + images

    return count


def count_tiny_image_tokens(png: bytes, patch_size: int) -> int:
    """Count an almost unresized image's tokens for the tiny policy."""
    from PIL import Image

    from offbeat.trainer.models.tiny import MERGE

    width, height = Image.open(io.BytesIO(png)).size
    return max(1, round(width / patch_size / MERGE)) * max(1, round(height / patch_size / MERGE))


def _first_texts(env: CustomEnv, seed: int) -> FirstTexts:
    instance = registry.make(env.env_type, env.env_config)
    try:
        observation, _ = instance.reset(seed=seed)
        traits = read_traits(instance)
        return _fill(env, traits, str(observation), render_png(instance) if env.shows_images else b"")
    finally:
        instance.close()


def _texts_of_trial(env: CustomEnv, trial: Trial) -> FirstTexts:
    refuse_failures(env, trial)
    assert trial.traits is not None, "an env that was not made is refused"
    return _fill(env, trial.traits, trial.observation, trial.png)


def _fill(env: CustomEnv, traits: EnvTraits, observation: str, png: bytes) -> FirstTexts:
    system = env.system_prompt(traits.system_prompt)
    user = fill_template(env.agent_template, observation=observation, step=1, actions_left=env.max_steps)
    words = user.replace(ROW_IMAGE, "")
    return FirstTexts(system, words, png, tuple(traits.functions), tuple(traits.seats))
