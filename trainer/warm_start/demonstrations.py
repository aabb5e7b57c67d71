"""Weak play as token sequences that a policy may be fine-tuned on.

Invariants: a demonstration's tokens are exactly those that a rollout would have recorded; its loss covers answers, and where
all is text the later observations of a conversation too, but never its first prompt.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from offbeat.envs import registry
from offbeat.envs.class_path import load_object
from offbeat.envs.prompts import fill_template
from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.messages.types import Picture
from offbeat.services.rollout.config import CustomEnv
from offbeat.services.rollout.episodes.history import TurnHistory
from offbeat.trainer.config.learner import WarmStartConfig
from offbeat.trainer.models.packing import PackedInput

Message = dict[str, str]
Play = Callable[..., list[Message]]
"""(env, rng) -> the chat messages of one episode (`WarmStartConfig.demos`)."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """tokens: [T] int64; learned: [M] int64, places of those that carry the loss; pictures: by their places in tokens."""

    tokens: Tensor
    learned: Tensor
    pictures: tuple[Picture, ...] = ()


Demonstrate = Callable[[np.random.Generator], list[Demonstration]]
"""One episode's conversations: one, or one for each turn where a prompt stands for itself."""


def demonstrator(config: WarmStartConfig, env: CustomEnv, chat: ChatFormat, *, max_tokens: int) -> Demonstrate:
    """What plays episodes of the demonstrated tag by `config.demos`. max_tokens: demonstrations longer than this are cut.

    Raises:
        ValueError: there is no such function, or no such env.
    """
    if env.shows_pictures:
        from offbeat.trainer.warm_start.vision_demonstrations import shown_demonstrator

        return shown_demonstrator(find_demos(config), env, chat, max_tokens=max_tokens)
    told = told_episodes(find_demos(config), env)
    return lambda rng: [_cut(tokenize(chat, messages), max_tokens) for messages in told(rng)]


def find_demos(config: WarmStartConfig) -> Play:
    """The function that `config.demos` names. Raises ValueError if there is none."""
    try:
        play = load_object(config.demos)
    except AttributeError as error:
        raise ValueError(f"warm_start.demos: {error}") from error
    if not callable(play):
        raise ValueError(f"warm_start.demos: {config.demos} is not a function")
    return cast(Play, play)


def play_once(play: Play, player: object, rng: np.random.Generator, env: CustomEnv) -> list[Message]:
    """One episode's messages; templates and turn limit of the tag are passed on if the function takes them."""
    offered = {
        "max_turns": env.max_steps,
        "system_prompt": env.agent_system_template,
        "agent_template": env.agent_template if env.env_manager_cls == "TrajEnvManager" else "{observation}",
    }
    taken = inspect.signature(play).parameters
    settings: dict[str, Any] = {key: value for key, value in offered.items() if key in taken}
    return play(player, rng, **settings)


def told_episodes(play: Play, env: CustomEnv) -> Callable[[np.random.Generator], list[list[Message]]]:
    """Episodes of a tag that is all text, as conversations.

    Of a tag that is played step-wise each turn becomes a conversation of its own, told as a rollout tells it.
    """
    player = registry.make(env.env_type, env.env_config)

    def demonstrate(rng: np.random.Generator) -> list[list[Message]]:
        messages = play_once(play, player, rng, env)
        return [messages] if env.env_manager_cls == "TrajEnvManager" else list(_step_by_step(messages, env))

    return demonstrate


def tokenize(chat: ChatFormat, messages: list[Message]) -> Demonstration:
    """Messages (an optional system one, then user and assistant in turn) to tokens, piece by piece as a rollout does.

    Raises:
        ValueError: the roles come in another order.
    """
    head, turns = taken_apart(messages)
    prompt = chat.first_prompt(head[0]["content"] if head else "", turns[0]["content"])
    rest: list[int] = []
    for message in turns[1:]:
        if message["role"] == "assistant":
            rest += (*chat.encode(message["content"]), chat.end_id)
        else:
            rest += chat.next_prompt(message["content"])
    length = len(prompt) + len(rest)
    return Demonstration(torch.tensor([*prompt, *rest], dtype=torch.int64), torch.arange(len(prompt), length))


def pack_demonstrations(demos: list[Demonstration]) -> PackedInput:
    """Lay demonstrations end to end and ask about all tokens that carry the loss."""
    borders = torch.tensor([0, *(len(demo.tokens) for demo in demos)]).cumsum(0)
    placed = list(zip(borders[:-1].tolist(), demos, strict=True))
    return PackedInput.of(
        torch.cat([demo.tokens for demo in demos]),
        borders,
        torch.cat([start + demo.learned for start, demo in placed]),
        pictures=tuple(replace(each, start=start + each.start) for start, demo in placed for each in demo.pictures),
    )


def taken_apart(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """The system message, if any, and the turns. Raises ValueError where user and assistant do not take turns."""
    count = int(messages[0]["role"] == "system")
    roles = [message["role"] for message in messages[count:]]
    if len(roles) < 2 or roles != [("user", "assistant")[i % 2] for i in range(len(roles))]:
        raise ValueError(f"a demonstration takes user and assistant in turn, got {', '.join(roles)}")
    return messages[:count], messages[count:]


def no_room(prompt: int) -> ValueError:
    """What is said where a demonstration's first prompt leaves no room for an answer."""
    return ValueError(f"warm start: the first prompt alone takes {prompt} tokens")


def _step_by_step(messages: list[Message], env: CustomEnv) -> Iterator[list[Message]]:
    """An episode of bare observations and answers as the prompts of a step-wise tag, each with its answer."""
    head, turns = taken_apart(messages)
    past = TurnHistory(env)
    for step, (seen, answer) in enumerate(zip(turns[::2], turns[1::2], strict=False), start=1):
        words = fill_template(
            env.agent_template,
            observation=past.shown(seen["content"]),
            step=step,
            actions_left=env.max_steps - step + 1,
            history=past.window(),
        )
        yield [*head, {"role": "user", "content": words}, answer]
        past.add(seen["content"], answer["content"])


def _cut(demo: Demonstration, max_tokens: int) -> Demonstration:
    learned = demo.learned[demo.learned < max_tokens]
    if not len(learned):
        raise no_room(int(demo.learned[0]))
    return Demonstration(demo.tokens[:max_tokens], learned)
