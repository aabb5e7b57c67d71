"""Checks of prompts with images (`pipeline: rlvr`)."""

from collections.abc import Callable, Iterator
from pathlib import Path

from offbeat.deploy.config.checks.model import has_vision
from offbeat.deploy.config.checks.prompts import check_with_template, count_tiny_image_tokens
from offbeat.deploy.config.run import RunConfig
from offbeat.envs.dataset.prompt import PromptError, read_prompt
from offbeat.services.chat.assistant_tokens import ConversationError
from offbeat.services.chat.vision import IMAGE_INPUT_ADVICE, ImageProcessor
from offbeat.services.errors import RolloutError
from offbeat.services.rollout.config import PROMPT_ENV, TOOL_ENV, CustomEnv
from offbeat.services.rollout.data.config import DataConfig
from offbeat.services.rollout.data.images import read_images
from offbeat.services.rollout.data.prompts import DomainRows
from offbeat.trainer.config.issue import ConfigIssue

Images = dict[str, list[tuple[bytes, ...]]]
"""Tag -> images of each of its rows that have some."""


def read_rows(domains: DomainRows, data: DataConfig, limit: int) -> Images:
    """Return the images of the first rows; raises ValueError, naming file and line, for one without a usable prompt."""
    found: Images = {}
    for row in domains.selected[:limit]:
        content = domains.rows[row]
        try:
            prompt = read_prompt(content, data.messages_key, data.prompt_key, data.images_key)
            images = read_images(content.get(data.images_key), domains.rows.folder) if prompt.num_images else ()
        except (PromptError, ConversationError) as error:
            raise PromptError(f"{domains.rows.name(row)}: {error}") from error
        if images:
            found.setdefault(domains.tag(row), []).append(images)
    return found


def check_images(config: RunConfig, images: Images, key: str) -> Iterator[ConfigIssue]:
    """Yield what keeps the policy from seeing a file's images. key: of the file."""
    if not images:
        return
    if not has_vision(config):
        yield ConfigIssue(key, f"its rows have images, and the policy has no image input: {IMAGE_INPUT_ADVICE}")
        return
    for tag in images:
        yield from _check_tag(tag, config.custom_envs[tag])
        if config.warm_start is not None and config.warm_start.tag == tag:
            message = "demonstrations have no images of rows: train on rows with pipeline: sft before, and set pretrain"
            yield ConfigIssue("warm_start", message)
    yield from check_with_template(config, _check_template)
    yield from _check_lengths(config, images, key)


def _check_tag(tag: str, env: CustomEnv) -> Iterator[ConfigIssue]:
    path = f"custom_envs.{tag}"
    wraps_prompt = env.env_type == TOOL_ENV and env.env_config.get("env_type") == PROMPT_ENV
    if env.env_type != PROMPT_ENV and not wraps_prompt:
        yield ConfigIssue(f"{path}.env_type", f"{env.env_type} does not show the rows' images: take {PROMPT_ENV}")
    if env.shows_images:
        message = "the rows' images are shown where the rows have them: leave {image} out"
        yield ConfigIssue(f"{path}.agent_template", message)
    if env.env_manager_cls != "TrajEnvManager":
        yield ConfigIssue(f"{path}.env_manager_cls", "images of rows need one conversation: take TrajEnvManager")
    if env.env_type == TOOL_ENV and env.env_config.get("function_calling") == "template":
        message = "functions of the chat template do not support images: take prompt"
        yield ConfigIssue(f"{path}.env_config.function_calling", message)


def _check_template(config: RunConfig) -> Iterator[ConfigIssue]:
    from offbeat.services.chat.append_only import load_chat_format

    if config.pretrain == "tiny":
        return
    try:
        reason = load_chat_format(Path(config.pretrain)).rewrites
    except RolloutError as error:
        reason = str(error)
    if reason:
        yield ConfigIssue("pretrain", f"images need a chat template that keeps earlier turns: {reason}")


def _check_lengths(config: RunConfig, images: Images, key: str) -> Iterator[ConfigIssue]:
    """Yield a tag of which no checked row leaves room for words."""
    limit = config.sequence_length - 1
    if config.data is not None and config.data.prompt_length is not None:
        limit = min(limit, config.data.prompt_length)
    try:
        count = _token_counter(config)
        shortest = {tag: min(sum(map(count, row)) for row in rows) for tag, rows in images.items()}
    except (RolloutError, ValueError) as error:
        yield ConfigIssue("pretrain", str(error))
        return
    for tag, tokens in shortest.items():
        if tokens >= limit:
            message = f"the images of {tag} take at least {tokens} tokens, and prompts have {limit}"
            yield ConfigIssue(key, f"{message}: use smaller images, or a larger sequence_length or data.prompt_length")


def _token_counter(config: RunConfig) -> Callable[[bytes], int]:
    if config.pretrain != "tiny":
        return ImageProcessor(Path(config.pretrain)).count
    vision = config.tiny.vision
    assert vision is not None, "a policy without image input is refused before"
    return lambda png: count_tiny_image_tokens(png, vision.patch_size)
