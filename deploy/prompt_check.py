"""Whether conversations can be had with the model: its chat template can be used, and each env's first prompt fits.

Plays one reset of each tag with the run's own tokenizer. A run that passes may still find a longer task, whose episode then
ends by `max_length`.
"""

import io
from collections.abc import Callable, Iterator
from pathlib import Path

from deploy.config import RunConfig
from deploy.preparation import NoWordsError, words_of
from deploy.problems import Problem
from envs import registry
from envs.prompting import IMAGE, fill_template
from services.errors import RolloutError
from services.rollout.config import CustomEnv
from services.rollout.execution import do_picture

CountTokens = Callable[[str, str, bytes], int]
"""(system message, first observation, its picture or nothing) -> tokens of the first prompt; of the built-in policy, without
those of its template.

Raises RolloutError where the chat template can't render the two."""


class BrokenTokenizerError(Exception):
    """A `tokenizer.json` that can't be read."""


def first_prompt_problems(config: RunConfig) -> list[Problem]:
    """A chat template that can't be used, tags whose env can't be reset, and first prompts that leave no room."""
    try:
        count_tokens = _count_tokens(config)
    except (NoWordsError, BrokenTokenizerError, RolloutError) as error:
        return [Problem("pretrain", str(error))]
    problems = [*_template_problems(config), *_parser_problems(config)]
    for tag, env in config.custom_envs.items():
        try:
            texts = _first_texts(env, config.seed)
        except Exception as error:
            # The user's own code: whatever it raises is what is wrong.
            message = f"{env.env_type} can't be reset: {type(error).__name__}: {error}"
            problems.append(Problem(f"custom_envs.{tag}.env_type", message))
            continue
        try:
            length = count_tokens(*texts)
        except RolloutError as error:
            key = "agent_template" if env.shows_pictures else "agent_system_template"
            problems.append(Problem(f"custom_envs.{tag}.{key}", str(error)))
            continue
        if length >= config.sequence_length:
            message = (
                f"{config.sequence_length} tokens leave no room for an answer: the first prompt of {tag} has at least "
                f"{length}; take more than {length + env.max_tokens_per_step}"
            )
            problems.append(Problem("sequence_length", message))
    return problems


def _parser_problems(config: RunConfig) -> Iterator[Problem]:
    """Parsers of tool calls that vLLM has not, or that do not fit the tokenizer."""
    from services.rollout.agent_episode import load_agent_template

    for tag, env in config.custom_envs.items():
        name = env.agent_runner.tool_call_parser if env.agent_runner else None
        if name is None:
            continue
        key = f"custom_envs.{tag}.agent_runner.tool_call_parser"
        if config.pretrain == "tiny":
            yield Problem(key, "the tiny policy's template offers no tools: leave it out")
            continue
        try:
            load_agent_template(Path(config.pretrain), name)
        except RolloutError as error:
            yield Problem(key, str(error))


def _template_problems(config: RunConfig) -> Iterator[Problem]:
    """What a template that rewrites history can't be used for."""
    if config.pretrain == "tiny":
        return
    from services.rollout.chat import load_chat_format

    if not (rewrites := load_chat_format(Path(config.pretrain)).rewrites):
        return
    if config.warm_start is not None:
        yield Problem("warm_start", f"demonstrations are one sequence each: {rewrites}")
    for tag, env in config.custom_envs.items():
        if env.shows_pictures and env.env_manager_cls == "TrajEnvManager":
            yield Problem(f"custom_envs.{tag}.env_manager_cls", f"take StepEnvManager to show pictures: {rewrites}")


def _count_tokens(config: RunConfig) -> CountTokens:
    from tokenizers import Tokenizer

    if config.pretrain == "tiny":
        from trainer.policies.tiny import build_tokenizer

        tokenizer = build_tokenizer(words_of(config))

        def count_tiny(system: str, observation: str, png: bytes) -> int:
            words = sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in (system, observation))
            return words + (_tokens_of(png, config.tiny.vision.patch_size) if png and config.tiny.vision else 0)

        return count_tiny
    path = Path(config.pretrain) / "tokenizer.json"
    if path.is_file():
        try:
            Tokenizer.from_file(str(path))
        except Exception as error:
            # tokenizers raises plain `Exception`s.
            raise BrokenTokenizerError(f"{path} is no tokenizer: {error}") from error
    from services.rollout.chat import load_chat_format

    chat = load_chat_format(Path(config.pretrain))

    def count(system: str, observation: str, png: bytes) -> int:
        pictures = chat.sight.reader.count(png) * observation.count(IMAGE) if png else 0
        return len(chat.first_prompt(system, observation)) + pictures

    return count


def _tokens_of(png: bytes, patch_size: int) -> int:
    """Of the tiny policy, which changes no picture's size by much."""
    from PIL import Image

    from trainer.policies.tiny import MERGE

    width, height = Image.open(io.BytesIO(png)).size
    return max(1, round(width / patch_size / MERGE)) * max(1, round(height / patch_size / MERGE))


def _first_texts(env: CustomEnv, seed: int) -> tuple[str, str, bytes]:
    made = registry.make(env.env_type, env.env_config)
    try:
        observation, _ = made.reset(seed=seed)
        default = getattr(made.unwrapped, "system_prompt", "")
        system = default if env.agent_system_template is None else env.agent_system_template
        user = fill_template(env.agent_template, observation=str(observation), step=1, actions_left=env.max_steps)
        return system, user, do_picture(made) if env.shows_pictures else b""
    finally:
        made.close()
