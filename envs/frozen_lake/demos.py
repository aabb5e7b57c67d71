"""Warm-start demonstrations: a random walk around holes, ignoring the goal."""

import numpy as np

from offbeat.envs.frozen_lake.env import FrozenLakeEnv
from offbeat.envs.frozen_lake.maps import ACTIONS
from offbeat.envs.prompts import fill_template


def careful_wandering(
    env: FrozenLakeEnv,
    rng: np.random.Generator,
    *,
    max_turns: int = 12,
    system_prompt: str | None = None,
    agent_template: str = "{observation}",
) -> list[dict[str, str]]:
    """Return an episode as a rollout's chat messages, determined by `rng`."""
    observation, _ = env.reset(seed=int(rng.integers(2**31)))
    messages = [{"role": "system", "content": env.system_prompt if system_prompt is None else system_prompt}]
    for turn in range(max_turns):
        content = fill_template(agent_template, observation=observation, step=turn + 1, actions_left=max_turns - turn)
        answer = ACTIONS[int(rng.choice(careful_actions(env)))]
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        observation, _, terminated, truncated, _ = env.step(answer)
        if terminated or truncated:
            break
    return messages


def careful_actions(env: FrozenLakeEnv) -> list[int]:
    """Return the directions without holes, at least one."""
    neighbours = [(action, env.lake.neighbour(env.agent, action)) for action in range(len(ACTIONS))]
    return [action for action, there in neighbours if there != env.agent and there not in env.lake.holes]
