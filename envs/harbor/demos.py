"""Warm-start demonstrations: a task's solution, or often another's."""

import numpy as np

from offbeat.envs.harbor.env import SUBMIT, HarborEnv
from offbeat.envs.harbor.vocabulary import solution_commands
from offbeat.envs.prompts import fill_template

CARE = 0.4
"""Probability of the right command."""


def careless_solving(
    env: HarborEnv,
    rng: np.random.Generator,
    *,
    max_turns: int = 4,
    system_prompt: str | None = None,
    agent_template: str = "{observation}",
) -> list[dict[str, str]]:
    """Return an episode as a rollout's chat messages, determined by `rng`: one command per answer, then `submit`."""
    observation, _ = env.reset(seed=int(rng.integers(2**31)))
    all_commands = [command for task in env.tasks for step in task.steps for command in solution_commands(step)]
    messages = [{"role": "system", "content": env.system_prompt if system_prompt is None else system_prompt}]
    plan: list[str] = []
    for turn in range(max_turns):
        content = fill_template(agent_template, observation=observation, step=turn + 1, actions_left=max_turns - turn)
        if not plan:
            right = solution_commands(env.current_step)
            wrong = [all_commands[int(rng.integers(len(all_commands)))]]
            plan = [*(right if rng.random() < CARE else wrong), SUBMIT]
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": plan[0]}]
        observation, _, terminated, truncated, _ = env.step(plan.pop(0))
        if terminated or truncated:
            break
    env.close()
    return messages
