"""A short supervised fine-tune on weak play, so that reinforcement learning starts from a policy that answers sensibly.

Invariants: demonstrations are token sequences exactly as a rollout would have recorded them; the loss covers answers and
later observations, never the first prompt; the same seed makes the same weights.
"""

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from envs import registry
from services.rollout.chat import ChatFormat
from services.rollout.config import CustomEnv
from trainer.config import WarmStartConfig
from trainer.engines.base import Hyperparameters, TrainEngine
from trainer.engines.schedule import plateau_rate
from trainer.models.packing import PackedInput
from trainer.models.policy import Sampled

logger = logging.getLogger(__name__)

Message = dict[str, str]
Demonstrate = Callable[[np.random.Generator], list[Message]]
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
    system = messages[0]["content"] if messages[0]["role"] == "system" else ""
    turns = messages[1:] if messages[0]["role"] == "system" else messages
    roles = [message["role"] for message in turns]
    if len(turns) < 2 or roles != [("user", "assistant")[i % 2] for i in range(len(turns))]:
        raise ValueError(f"a demonstration takes user and assistant in turn, got {', '.join(roles)}")
    prompt = chat.first_prompt(system, turns[0]["content"])
    rest: list[int] = []
    for message in turns[1:]:
        if message["role"] == "assistant":
            rest += (*chat.encode(message["content"]), chat.end_id)
        else:
            rest += chat.next_prompt(message["content"])
    return Demonstration(torch.tensor([*prompt, *rest], dtype=torch.int64), len(rest))


def demonstrator(config: WarmStartConfig, env: CustomEnv) -> Demonstrate:
    """Bind `config.demos` to an env of the demonstrated tag; templates and turn limit are passed on if it takes them.

    Raises:
        ValueError: there is no such function, or no such env.
    """
    module, _, name = config.demos.partition(":")
    play = getattr(import_module(module), name, None)
    if not callable(play):
        raise ValueError(f"warm_start.demos: {module} has no function {name!r}")
    player = registry.make(env.env_type, env.env_config)
    offered = {
        "max_turns": env.max_steps,
        "system_prompt": env.agent_system_template,
        "agent_template": env.agent_template,
    }
    taken = inspect.signature(play).parameters
    settings: dict[str, Any] = {key: value for key, value in offered.items() if key in taken}
    return lambda rng: cast(list[Message], play(player, rng, **settings))


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
        demos = [_cut(tokenize(chat, demonstrate(rng)), max_tokens) for _ in range(config.episodes_per_step)]
        shares = [demos[i :: engine.world_size] for i in range(min(engine.world_size, len(demos)))]
        loss = _step(engine, [pack_demonstrations(share) for share in shares], _hyperparameters(config, step))
        if step % 10 == 9 or step + 1 == config.steps:
            progress(step + 1, config.steps)
    engine.reset_optimizer()
    logger.info("warm start: %d steps, last loss %.3f nats per token", config.steps, loss)
    return loss


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
