"""Tasks of episodes, computed from configuration, run seed and number, or drawn by a task sampler.

Invariants: all workers compute the same task; a draw depends on the sampler's state, so a group's first draw is stored.
Evaluation seeds start at 2**31, in the held-out split if any, and never equal training tasks.
"""

import asyncio
import json
import zlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from typing import NamedTuple, Protocol, cast

import numpy as np

from offbeat.envs.class_path import load_object
from offbeat.envs.registry import distinct_seeds, held_out_config
from offbeat.envs.task_samplers import TaskSampler
from offbeat.services.errors import EpisodeError
from offbeat.services.rollout.config import CustomEnv, EnvManagerConfig

FIRST_EVAL_SEED = 1 << 31
TRAIN, EVAL = 0, 1
BAD_TASK, SAMPLER_KEY = "bad_task", "train_env_manager.task_sampler"
"""Reason of a failed draw, and the key that may fix it."""


FindSeeds = Callable[[str, int, int], Awaitable[list[int]]]
"""(tag, number, first seed) -> seeds with distinct tasks."""


class TaskConfig(Protocol):
    @property
    def custom_envs(self) -> Mapping[str, CustomEnv]: ...
    @property
    def train_env_manager(self) -> EnvManagerConfig: ...
    @property
    def val_env_manager(self) -> EnvManagerConfig: ...


class Task(NamedTuple):
    tag: str
    seed: int


def train_task(config: TaskConfig, seed: int, number: int, state: str = "") -> Task:
    """Return a training group's task.

    state: the sampler's, as JSON; empty: a fresh sampler.

    Raises:
        ValueError: the sampler can't be constructed, or drew an invalid task.
    """
    if config.train_env_manager.task_sampler is not None:
        return _draw(config, seed, number, state)
    cycle = tag_cycle(config.custom_envs, config.train_env_manager)
    return Task(cycle[number % len(cycle)], _seed_of_group(seed, number))


def make_sampler(custom_envs: Mapping[str, CustomEnv], manager: EnvManagerConfig) -> TaskSampler | None:
    """Construct the training task sampler, if any.

    Raises:
        ValueError: import or construction failed.
    """
    sampler_config = manager.task_sampler
    if sampler_config is None:
        return None
    try:
        sampler = load_object(sampler_config.path)(manager.tags_of(custom_envs), **sampler_config.args)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{sampler_config.path} can't be made: {error}; it is called with the tags, and args"
        ) from error
    if missing := [name for name in ("draw", "learn", "state_dict", "load_state_dict") if not hasattr(sampler, name)]:
        raise ValueError(
            f"{sampler_config.path} has no method {missing[0]}: it must be as offbeat.envs.task_samplers.TaskSampler"
        )
    return cast(TaskSampler, sampler)


def _draw(config: TaskConfig, seed: int, number: int, state: str) -> Task:
    sampler = make_sampler(config.custom_envs, config.train_env_manager)
    assert sampler is not None
    if state:
        sampler.load_state_dict(json.loads(state))
    rng = np.random.default_rng(np.random.SeedSequence(entropy=seed % (1 << 64), spawn_key=(TRAIN, number, 1)))
    tag, chosen = sampler.draw(rng)
    if tag not in config.train_env_manager.tags_of(config.custom_envs):
        raise ValueError(f"the task sampler drew tag {tag!r}, which training does not have")
    if chosen is not None and not 0 <= chosen < FIRST_EVAL_SEED:
        raise ValueError(f"the task sampler drew seed {chosen}, which is not in [0, 2**31)")
    return Task(str(tag), _seed_of_group(seed, number) if chosen is None else int(chosen))


@lru_cache
def _seed_of_group(seed: int, number: int) -> int:
    state = np.random.SeedSequence(entropy=seed % (1 << 64), spawn_key=(TRAIN, number)).generate_state(1)
    return int(state[0]) % FIRST_EVAL_SEED


def eval_task(config: TaskConfig, seed: int, number: int) -> Task:
    """Return one task; `EvalTasks` is faster for many."""
    return EvalTasks(config, seed).task(number)


class EvalTasks:
    """Evaluation tasks, equal in each evaluation and distinct if the env has enough."""

    def __init__(self, config: TaskConfig, seed: int) -> None:
        self._envs = config.custom_envs
        self._cycle = tag_cycle(config.custom_envs, config.val_env_manager)
        self._group_size = config.val_env_manager.group_size
        self._seed = seed
        self._seeds: dict[str, list[int]] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._failures: dict[str, EpisodeError] = {}
        """Of the newest search that failed, by tag."""

    def task(self, number: int, *, greedy: bool = False) -> Task:
        """Return an episode's task, equal for `group_size` successive ones, or one if they would be played alike."""
        tag, index = self._position(number, greedy=greedy)
        if num_seeds := self._num_missing(tag, index):
            env = self._envs[tag]
            held_out = held_out_config(env.env_type, env.env_config)
            self._seeds[tag] = distinct_seeds(num_seeds, self._first_seed(tag), env.env_type, held_out)
        return Task(tag, self._seeds[tag][index])

    async def find(self, number: int, find_seeds: FindSeeds, *, greedy: bool = False) -> Task:
        """Return `task`, with seeds from `find_seeds`; raises its EpisodeError, also to all that waited for it."""
        tag, index = self._position(number, greedy=greedy)
        earlier = self._failures.get(tag)
        async with self._locks[tag]:
            if num_seeds := self._num_missing(tag, index):
                failure = self._failures.get(tag)
                if failure is not None and failure is not earlier:
                    raise failure
                try:
                    self._seeds[tag] = await find_seeds(tag, num_seeds, self._first_seed(tag))
                except EpisodeError as error:
                    self._failures[tag] = error
                    raise
        return Task(tag, self._seeds[tag][index])

    def tag_of(self, number: int, *, greedy: bool = False) -> str:
        return self._position(number, greedy=greedy)[0]

    def _position(self, number: int, *, greedy: bool) -> tuple[str, int]:
        """Return an episode's tag, and the index of its task among those of the tag."""
        rounds, place = divmod(number // (1 if greedy else self._group_size), len(self._cycle))
        tag = self._cycle[place]
        return tag, self._cycle[:place].count(tag) + rounds * self._cycle.count(tag)

    def _num_missing(self, tag: str, index: int) -> int:
        """Return the number of seeds to find, 0 if there are enough."""
        return 0 if index < len(self._seeds.get(tag, ())) else max(64, 1 << index.bit_length())

    def _first_seed(self, tag: str) -> int:
        key = (EVAL, zlib.crc32(tag.encode()))
        state = np.random.SeedSequence(entropy=self._seed % (1 << 64), spawn_key=key).generate_state(1)
        return FIRST_EVAL_SEED + int(state[0]) % (FIRST_EVAL_SEED // 2)


def tag_cycle(custom_envs: Mapping[str, CustomEnv], manager: EnvManagerConfig) -> tuple[str, ...]:
    """Return the cycle of tags, evenly spread."""
    tags = manager.tags_of(custom_envs)
    shares = manager.num_groups_partition or (1,) * len(tags)
    places = [
        ((turn + 0.5) / share, rank, tag)
        for rank, (tag, share) in enumerate(zip(tags, shares, strict=True))
        for turn in range(share)
    ]
    return tuple(tag for _, _, tag in sorted(places))
