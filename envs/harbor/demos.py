"""Warm-start demonstrations: a task's solution, or more often another's."""

from functools import lru_cache

import numpy as np

from offbeat.envs.harbor.env import SUBMIT, HarborEnv
from offbeat.envs.harbor.task import HarborTask
from offbeat.envs.harbor.vocabulary import solution_commands
from offbeat.envs.prompts import fill_template

CARE = 0.4
"""Probability of the right commands for a step."""
NUM_WRONG = 3
"""Other tasks whose commands are the wrong ones; few, so that equal episodes recur and are cached."""

Message = tuple[str, str]


def careless_solving(
    env: HarborEnv,
    rng: np.random.Generator,
    *,
    max_turns: int = 4,
    system_prompt: str | None = None,
    agent_template: str = "{observation}",
) -> list[dict[str, str]]:
    """Return an episode as a rollout's chat messages, determined by `rng`: one command per answer, then `submit`."""
    seed = _first_seed(env, env.task_id(int(rng.integers(2**31))))
    wrong, plan = _wrong_commands(env, seed), list[str]()
    for step in _task(env, seed).steps:
        right = solution_commands(step)
        plan += [*(right if rng.random() < CARE else [wrong[int(rng.integers(len(wrong)))]]), SUBMIT]
    prompt = env.system_prompt if system_prompt is None else system_prompt
    messages = [("system", prompt), *_play(env, seed, tuple(plan[:max_turns]), max_turns, agent_template)]
    return [{"role": role, "content": content} for role, content in messages]


@lru_cache(maxsize=4096)
def _play(env: HarborEnv, seed: int, plan: tuple[str, ...], max_turns: int, agent_template: str) -> tuple[Message, ...]:
    messages: list[Message] = []
    observation, _ = env.reset(seed=seed)
    for turn, command in enumerate(plan):
        content = fill_template(agent_template, observation=observation, step=turn + 1, actions_left=max_turns - turn)
        messages += [("user", content), ("assistant", command)]
        observation, _, terminated, truncated, _ = env.step(command)
        if terminated or truncated:
            break
    env.close()
    return tuple(messages)


@lru_cache(maxsize=4096)
def _first_seed(env: HarborEnv, task_id: str) -> int:
    return next(seed for seed in range(2**31) if env.task_id(seed) == task_id)


def _task(env: HarborEnv, seed: int) -> HarborTask:
    return next(task for task in env.tasks if str(task.folder) == env.task_id(seed))


@lru_cache(maxsize=4096)
def _wrong_commands(env: HarborEnv, seed: int) -> tuple[str, ...]:
    names = sorted(task.name for task in env.tasks)
    at = names.index(_task(env, seed).name)
    near = [names[(at + shift) % len(names)] for shift in range(1, NUM_WRONG + 1)]
    steps = [step for task in env.tasks if task.name in near for step in task.steps[:1]]
    return tuple(solution_commands(step)[0] for step in steps) or (SUBMIT,)
