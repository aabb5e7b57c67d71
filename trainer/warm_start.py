"""A short supervised fine-tune on weak play, so that reinforcement learning starts from a policy that answers sensibly.

Invariants: demonstrations are token sequences exactly as a rollout would have recorded them; the loss covers answers and
later observations of a conversation, never its first prompt; the same seed makes the same weights.
"""

import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from envs import registry
from envs.prompting import fill_template
from services.rollout.chat import ChatFormat
from services.rollout.config import CustomEnv
from services.rollout.past import Past
from trainer.config import WarmStartConfig
from trainer.engines.base import Hyperparameters, TrainEngine
from trainer.engines.schedule import plateau_rate
from trainer.models.packing import PackedInput
from trainer.models.policy import Sampled

logger = logging.getLogger(__name__)

Message = dict[str, str]
Demonstrate = Callable[[np.random.Generator], list[list[Message]]]
"""One episode's conversations: one, or one for each turn where a prompt stands for itself."""
Progress = Callable[[int, int], None]
"""(steps done, steps in all)."""

DEMO_STREAM = 0xDE30
"""Sets demonstrations apart from everything else that the run's seed fixes."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """tokens: [T] int64; learned: how many of the last ones carry the loss."""

    tokens: Tensor
    learned: int


def tokenize(chat: ChatFormat, messages: list[Message]) -> Demonstration:
    """Messages (an optional system one, then user and assistant in turn) to tokens, piece by piece as a rollout does.

    Raises:
        ValueError: the roles come in another order.
    """
    head, turns = _taken_apart(messages)
    prompt = chat.first_prompt(head[0]["content"] if head else "", turns[0]["content"])
    rest: list[int] = []
    for message in turns[1:]:
        if message["role"] == "assistant":
            rest += (*chat.encode(message["content"]), chat.end_id)
        else:
            rest += chat.next_prompt(message["content"])
    return Demonstration(torch.tensor([*prompt, *rest], dtype=torch.int64), len(rest))


def demonstrator(config: WarmStartConfig, env: CustomEnv) -> Demonstrate:
    """Bind `config.demos` to an env of the demonstrated tag; templates and turn limit are passed on if it takes them.

    Of a tag that is played step-wise each turn becomes a conversation of its own, told as a rollout tells it.

    Raises:
        ValueError: there is no such function, or no such env.
    """
    module, _, name = config.demos.partition(":")
    play = getattr(import_module(module), name, None)
    if not callable(play):
        raise ValueError(f"warm_start.demos: {module} has no function {name!r}")
    player = registry.make(env.env_type, env.env_config)
    whole = env.env_manager_cls == "TrajEnvManager"
    offered = {
        "max_turns": env.max_steps,
        "system_prompt": env.agent_system_template,
        "agent_template": env.agent_template if whole else "{observation}",
    }
    taken = inspect.signature(play).parameters
    settings: dict[str, Any] = {key: value for key, value in offered.items() if key in taken}

    def demonstrate(rng: np.random.Generator) -> list[list[Message]]:
        messages = cast(list[Message], play(player, rng, **settings))
        return [messages] if whole else list(_step_by_step(messages, env))

    return demonstrate


def pack_demonstrations(demos: list[Demonstration]) -> PackedInput:
    """Lay demonstrations end to end and ask about all tokens that carry the loss."""
    borders = torch.tensor([0, *(len(demo.tokens) for demo in demos)]).cumsum(0)
    asked = [torch.arange(end - demo.learned, end) for demo, end in zip(demos, borders[1:].tolist(), strict=True)]
    return PackedInput.of(torch.cat([demo.tokens for demo in demos]), borders, torch.cat(asked))


def warm_start(
    engine: TrainEngine[Sampled],
    config: WarmStartConfig,
    demonstrate: Demonstrate,
    chat: ChatFormat,
    *,
    seed: int,
    max_tokens: int,
    progress: Progress,
    stopped: Callable[[], bool] = lambda: False,
) -> float | None:
    """Train the engine's policy, then forget the optimizer's moments; collective over ranks.

    max_tokens: demonstrations longer than this are cut; they would not fit the model's context.
    progress: called now and then.

    Returns:
        The last step's loss in nats per token, or None if `stopped` said so first.
    """
    rng = np.random.default_rng([seed, DEMO_STREAM])
    loss = 0.0
    for step in range(config.steps):
        if stopped():
            return None
        told = [each for _ in range(config.episodes_per_step) for each in demonstrate(rng)]
        demos = [_cut(tokenize(chat, messages), max_tokens) for messages in told]
        shares = [demos[i :: engine.world_size] for i in range(min(engine.world_size, len(demos)))]
        loss = _step(engine, [pack_demonstrations(share) for share in shares], _hyperparameters(config, step))
        if step % 10 == 9 or step + 1 == config.steps:
            progress(step + 1, config.steps)
    engine.reset_optimizer()
    logger.info("warm start: %d steps, last loss %.3f nats per token", config.steps, loss)
    return loss


def _taken_apart(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """The system message, if any, and the turns. Raises ValueError where user and assistant do not take turns."""
    count = int(messages[0]["role"] == "system")
    roles = [message["role"] for message in messages[count:]]
    if len(roles) < 2 or roles != [("user", "assistant")[i % 2] for i in range(len(roles))]:
        raise ValueError(f"a demonstration takes user and assistant in turn, got {', '.join(roles)}")
    return messages[:count], messages[count:]


def _step_by_step(messages: list[Message], env: CustomEnv) -> Iterator[list[Message]]:
    """An episode of bare observations and answers as the prompts of a step-wise tag, each with its answer."""
    head, turns = _taken_apart(messages)
    past = Past(env)
    for seen, answer in zip(turns[::2], turns[1::2], strict=False):
        words = fill_template(
            env.agent_template,
            observation=past.shown(seen["content"]),
            step=len(past) + 1,
            actions_left=env.max_steps - len(past),
            history=past.window(),
        )
        yield [*head, {"role": "user", "content": words}, answer]
        past.add(seen["content"], answer["content"])


def _cut(demo: Demonstration, max_tokens: int) -> Demonstration:
    over = max(0, len(demo.tokens) - max_tokens)
    if over >= demo.learned:
        raise ValueError(f"warm start: the first prompt alone takes {len(demo.tokens) - demo.learned} tokens")
    return Demonstration(demo.tokens[: len(demo.tokens) - over], demo.learned - over)


def _step(engine: TrainEngine[Sampled], batch: list[PackedInput], hyperparameters: Hyperparameters) -> float:
    count = sum(len(x.positions) for x in batch)
    losses: list[float] = []

    def nll(_: int, said: Sampled) -> Tensor:
        loss = -said.logprobs.sum() / count
        losses.append(float(loss.detach()))
        return loss

    engine.train(batch, nll, hyperparameters)
    return sum(losses)


def _hyperparameters(config: WarmStartConfig, step: int) -> Hyperparameters:
    rate = plateau_rate(
        step,
        peak=config.learning_rate,
        warmup_steps=config.warmup_steps,
        total_steps=config.steps,
        final_ratio=config.final_lr_ratio,
    )
    return Hyperparameters(rate, config.weight_decay)
