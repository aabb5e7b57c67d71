"""Weak play to warm a policy start up with: it moves where it can, and now and then does what solves the room."""

import numpy as np

from envs.prompting import fill_template
from envs.sokoban.env import SokobanEnv
from envs.sokoban.rooms import ACTIONS, Room
from envs.sokoban.solver import solve

SOLVING_SHARE = 0.25
"""Of the turns in which a solving player does the right thing."""


def restless_pushing(
    env: SokobanEnv,
    rng: np.random.Generator,
    *,
    max_turns: int = 12,
    system_prompt: str | None = None,
    agent_template: str = "{observation}",
) -> list[dict[str, str]]:
    """One episode on a fresh room as chat messages, in the format of a rollout with the same templates.

    Each turn is, one time in four, a shortest solution's next move, and else any move that changes something. The last
    message is the last answer. Room and play depend on `rng` alone.
    """
    observation, _ = env.reset(seed=int(rng.integers(2**31)))
    messages = [{"role": "system", "content": env.system_prompt if system_prompt is None else system_prompt}]
    for turn in range(max_turns):
        content = fill_template(agent_template, observation=observation, step=turn + 1, actions_left=max_turns - turn)
        answer = env.config.action_lookup[_choose(env.room, rng) + 1]
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        observation, _, terminated, truncated, _ = env.step(answer)
        if terminated or truncated:
            break
    return messages


def moves(room: Room) -> list[int]:
    """Actions that change something; empty for a player that boxes shut in."""
    return [action for action in range(len(ACTIONS)) if room.push(action) is not room]


def _choose(room: Room, rng: np.random.Generator) -> int:
    if rng.random() < SOLVING_SHARE and (solution := solve(room)):
        return solution[0]
    return int(rng.choice(moves(room) or range(len(ACTIONS))))
