"""Vocabulary of the tiny policy."""

import sys
from collections.abc import Iterator
from typing import cast

from offbeat.deploy.config.run import RunConfig
from offbeat.envs import registry


class MissingWordsError(Exception):
    """Env without words for the tiny policy."""


def collect_words(config: RunConfig) -> tuple[str, ...]:
    """Return the envs' distinct words in a stable order.

    Raises:
        MissingWordsError: an env declares none.
    """
    return tuple(dict.fromkeys(_words(config)))


def _words(config: RunConfig) -> Iterator[str]:
    for env in config.custom_envs.values():
        factory = registry.find_factory(env.env_type)
        module = sys.modules[factory.__module__]
        words = getattr(factory, "words", None) or getattr(module, "WORDS", None)
        if words is None:
            raise MissingWordsError(
                f"{env.env_type} does not declare its words, which the tiny policy's tokenizer needs: add an attribute "
                "`words` to its class, or set pretrain to a Hugging Face folder"
            )
        yield from cast(tuple[str, ...], words)
        for template in (env.agent_system_template or "", env.env_instruction or "", env.agent_template):
            yield from (word for word in template.split() if "{" not in word)
        if "{step}" in env.agent_template or "{actions_left}" in env.agent_template:
            yield from (str(number) for number in range(env.max_steps + 1))
