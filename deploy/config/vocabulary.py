"""Vocabulary of the tiny policy."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from offbeat.deploy.config.run import RunConfig
from offbeat.envs import registry
from offbeat.envs.dataset.files import open_rows, read_field
from offbeat.services.chat.assistant_tokens import content_parts
from offbeat.services.rollout.config import CustomEnv
from offbeat.services.rollout.data.source import message_keys
from offbeat.trainer.models.tiny import SPECIAL_TOKENS


class MissingWordsError(Exception):
    """Env without words for the tiny policy."""


def collect_words(config: RunConfig) -> tuple[str, ...]:
    """Return the envs' distinct words in a stable order; raises `MissingWordsError`."""
    return tuple(dict.fromkeys(_words(config)))


def _words(config: RunConfig) -> Iterator[str]:
    if config.pipeline == "distill" and (taught := tuple(_words_of_teachers(config))):
        yield from taught  # and no other: distributions are compared by token id
        return
    yield from _words_of_data(config)
    for env in config.custom_envs.values():
        factory = registry.find_factory(env.env_type)
        module = sys.modules[factory.__module__]
        words: tuple[str, ...] | property | None = getattr(factory, "words", None) or getattr(module, "WORDS", None)
        if words is None or isinstance(words, property):
            words = _words_of_instance(env)
        if words is None:
            raise MissingWordsError(_missing_words(env.env_type, env.env_config))
        yield from words
        for template in (env.agent_system_template or "", env.env_instruction or "", env.agent_template):
            yield from (word for word in template.split() if "{" not in word)
        if "{step}" in env.agent_template or "{actions_left}" in env.agent_template:
            yield from (str(number) for number in range(env.max_steps + 1))


def _missing_words(env_type: str, env_config: Mapping[str, Any]) -> str:
    key = "env_config"
    while env_type == "tools":
        env_type, env_config, key = env_config["env_type"], env_config.get("env_config", {}), f"{key}.env_config"
    remedy = "" if env_type in registry.BUILT_IN else "add an attribute `words` to its class, or "
    if "words" in registry.setting_names(env_type):
        remedy = f"set {key}.words, or "
    return (
        f"{env_type} does not declare its words, which the tiny policy's tokenizer needs: {remedy}set pretrain to a "
        "Hugging Face folder"
    )


def _words_of_teachers(config: RunConfig) -> Iterator[str]:
    """Yield tiny teachers' words in the order of their ids, which the policy needs."""
    folders = [teacher.model_args.own_folder for teacher in config.teacher.values()]
    for folder in filter(None, folders):
        vocabulary = read_tiny_vocabulary(Path(folder))
        words = sorted(vocabulary, key=vocabulary.__getitem__)
        yield from (word for word in words if word not in SPECIAL_TOKENS)


def read_tiny_vocabulary(folder: Path) -> dict[str, int]:
    """Return the token ids of a tiny policy's tokenizer; empty for another one."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return {}
    model = json.loads(path.read_text())["model"]
    return model["vocab"] if model["type"] == "WordLevel" else {}


def _words_of_data(config: RunConfig) -> Iterator[str]:
    if config.data is None:
        return
    for path in (config.data.dataset_name, config.data.val_dataset_name):
        if path is None:
            continue
        truth = (config.data.ground_truth_key,) if config.plays_prompts else ()
        rows = open_rows(path, exact=truth)
        named = (*message_keys(config.data), *truth)
        for row in rows.scan(sorted({part for key in named for part in (key, key.partition(".")[0])})):
            for key in named:
                yield from _words_of_value(read_field(row, key))


def _words_of_value(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield from _split(value)
    elif isinstance(value, list):
        for message in cast(list[dict[str, object]], value):
            texts = [part.get("text") for part in content_parts(message)] or [message.get("content")]
            yield from (word for text in texts for word in _split(str(text or "")))


def _split(text: str) -> list[str]:
    """Return the words without halves of surrogate pairs, which no tokenizer takes: their row is refused by itself."""
    return text.encode(errors="ignore").decode().split()


def _words_of_instance(env: CustomEnv) -> tuple[str, ...] | None:
    """Return the words that depend on an env's settings."""
    try:
        instance = registry.make(env.env_type, env.env_config)
    except Exception:  # a user's env may raise anything, which the check of its first prompt reports
        return ()
    try:
        return getattr(instance.unwrapped, "words", None)
    finally:
        instance.close()
