"""Demonstrated episodes.

Invariants: tokens are a rollout's; the loss covers answers and, without images, later observations, never the first
prompt.
"""

import inspect
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from offbeat.envs import registry
from offbeat.envs.class_path import load_object
from offbeat.envs.prompts import fill_template
from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.messages.types import PromptImage
from offbeat.services.rollout.config import CustomEnv
from offbeat.services.rollout.episodes.history import TurnHistory
from offbeat.trainer.config.warm_start import WarmStartConfig
from offbeat.trainer.models.packing import PackedInput

ChatMessageDict = dict[str, str]
Demos = Callable[..., list[ChatMessageDict]]
"""(env, rng) -> chat messages of one episode."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """Token sequence. tokens: [T] int64; learned: [M] int64, positions with a loss."""

    tokens: Tensor
    learned: Tensor
    images: tuple[PromptImage, ...] = ()


Demonstrate = Callable[[np.random.Generator], list[Demonstration]]
"""Runs one episode; returns one demonstration, or one per turn."""


def load_demos(config: WarmStartConfig) -> Demos:
    """Import `config.demos`.

    Raises:
        ValueError: no such function.
    """
    try:
        demos = load_object(config.demos)
    except AttributeError as error:
        raise ValueError(f"warm_start.demos: {error}") from error
    if not callable(demos):
        raise ValueError(f"warm_start.demos: {config.demos} is not a function")
    return cast(Demos, demos)


def run_demo(demos: Demos, env: object, rng: np.random.Generator, tag: CustomEnv) -> list[ChatMessageDict]:
    """Return one episode's messages; templates and turn limit are passed if accepted.

    Raises:
        ValueError: `demos` raised, or returned no messages.
    """
    available = {
        "max_turns": tag.max_steps,
        "system_prompt": None if tag.agent_system_template is tag.env_instruction is None else tag.system_prompt(""),
        "agent_template": tag.agent_template if tag.env_manager_cls == "TrajEnvManager" else "{observation}",
    }
    accepted = inspect.signature(demos).parameters
    kwargs: dict[str, Any] = {key: value for key, value in available.items() if key in accepted}
    try:
        messages = demos(env, rng, **kwargs)
    except Exception as error:
        *_, frame = traceback.extract_tb(error.__traceback__)
        where = f"{Path(frame.filename).name}, line {frame.lineno}"
        raise ValueError(f"warm_start.demos raised {type(error).__name__}: {error} ({where})") from error
    if not messages:
        raise ValueError("warm_start.demos returned no messages: an episode has at least a user's and an assistant's")
    return messages


def make_text_demonstrator(demos: Demos, env: CustomEnv, chat: ChatFormat, *, max_tokens: int) -> Demonstrate:
    sample = make_conversation_sampler(demos, env)
    return lambda rng: [_truncate(tokenize(chat, messages), max_tokens) for messages in sample(rng)]


def make_conversation_sampler(
    demos: Demos, env: CustomEnv
) -> Callable[[np.random.Generator], list[list[ChatMessageDict]]]:
    instance = registry.make(env.env_type, env.env_config)

    def sample(rng: np.random.Generator) -> list[list[ChatMessageDict]]:
        messages = run_demo(demos, instance, rng, env)
        return [messages] if env.env_manager_cls == "TrajEnvManager" else list(_split_into_steps(messages, env))

    return sample


def tokenize(chat: ChatFormat, messages: list[ChatMessageDict]) -> Demonstration:
    """Tokenize piecewise.

    Raises:
        ValueError: user and assistant do not alternate.
    """
    system, turns = split_messages(messages)
    prompt = chat.first_prompt(system[0]["content"] if system else "", turns[0]["content"])
    rest: list[int] = []
    for message in turns[1:]:
        if message["role"] == "assistant":
            rest += (*chat.encode(message["content"]), chat.end_id)
        else:
            rest += chat.next_prompt(message["content"])
    length = len(prompt) + len(rest)
    return Demonstration(torch.tensor([*prompt, *rest], dtype=torch.int64), torch.arange(len(prompt), length))


def pack_demonstrations(demos: list[Demonstration]) -> PackedInput:
    borders = torch.tensor([0, *(len(demo.tokens) for demo in demos)]).cumsum(0)
    offset_demos = list(zip(borders[:-1].tolist(), demos, strict=True))
    return PackedInput.of(
        torch.cat([demo.tokens for demo in demos]),
        borders,
        torch.cat([offset + demo.learned for offset, demo in offset_demos]),
        images=tuple(
            structs.replace(image, start=offset + image.start) for offset, demo in offset_demos for image in demo.images
        ),
    )


def split_messages(messages: list[ChatMessageDict]) -> tuple[list[ChatMessageDict], list[ChatMessageDict]]:
    """Return system message and turns.

    Raises:
        ValueError: user and assistant do not alternate.
    """
    count = int(messages[0]["role"] == "system")
    roles = [message["role"] for message in messages[count:]]
    if len(roles) < 2 or roles != [("user", "assistant")[i % 2] for i in range(len(roles))]:
        raise ValueError(f"warm_start.demos: user and assistant must alternate, got {', '.join(roles)}")
    return messages[:count], messages[count:]


def prompt_too_long_error(length: int) -> ValueError:
    return ValueError(f"warm start: the first prompt alone takes {length} tokens")


def _split_into_steps(messages: list[ChatMessageDict], env: CustomEnv) -> Iterator[list[ChatMessageDict]]:
    system, turns = split_messages(messages)
    history = TurnHistory(env)
    for step, (observation, answer) in enumerate(zip(turns[::2], turns[1::2], strict=False), start=1):
        prompt = fill_template(
            env.agent_template,
            observation=history.render_observation(observation["content"]),
            step=step,
            actions_left=env.max_steps - step + 1,
            history=history.render_history(),
        )
        yield [*system, {"role": "user", "content": prompt}, answer]
        history.add(observation["content"], answer["content"])


def _truncate(demo: Demonstration, max_tokens: int) -> Demonstration:
    learned = demo.learned[demo.learned < max_tokens]
    if not len(learned):
        raise prompt_too_long_error(int(demo.learned[0]))
    return Demonstration(demo.tokens[:max_tokens], learned)
