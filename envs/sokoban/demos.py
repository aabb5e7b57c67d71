"""Warm-start demonstrations: best moves mixed with random ones."""

import numpy as np

from offbeat.envs.prompts import fill_template
from offbeat.envs.sokoban.env import SokobanEnv
from offbeat.envs.sokoban.rooms import ACTIONS, Cell, Room
from offbeat.envs.sokoban.solver import distances

SKILL = 0.6
"""Probability of a best move; others are random."""


def clumsy_solving(
    env: SokobanEnv,
    rng: np.random.Generator,
    *,
    max_turns: int = 12,
    system_prompt: str | None = None,
    agent_template: str = "{observation}",
) -> list[dict[str, str]]:
    """Return an episode as a rollout's chat messages, determined by `rng`."""
    observation, _ = env.reset(seed=int(rng.integers(2**31)))
    remaining = distances(env.room)
    messages = [{"role": "system", "content": env.system_prompt if system_prompt is None else system_prompt}]
    for turn in range(max_turns):
        content = fill_template(agent_template, observation=observation, step=turn + 1, actions_left=max_turns - turn)
        answer = env.config.action_lookup[_choose(env.room, remaining, rng) + 1]
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        observation, _, terminated, truncated, _ = env.step(answer)
        if terminated or truncated:
            break
    return messages


def moves(room: Room) -> list[int]:
    return [action for action in range(len(ACTIONS)) if room.push(action) is not room]


def best_moves(room: Room, remaining: dict[tuple[Cell, frozenset[Cell]], int]) -> list[int]:
    """Return the actions on shortest solutions; empty if unsolvable."""
    after = {action: room.push(action) for action in moves(room)}
    num_remaining = {
        action: remaining[key] for action, at in after.items() if (key := (at.player, at.boxes)) in remaining
    }
    return [action for action, distance in num_remaining.items() if distance == min(num_remaining.values())]


def _choose(room: Room, remaining: dict[tuple[Cell, frozenset[Cell]], int], rng: np.random.Generator) -> int:
    best = best_moves(room, remaining) if rng.random() < SKILL else []
    return int(rng.choice(best or moves(room) or range(len(ACTIONS))))
