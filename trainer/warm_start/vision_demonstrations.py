"""Demonstrated episodes of a tag that shows pictures, told to the policy by the code that tells it its own episodes.

Invariants: tokens, pictures and what carries the loss (answers alone) are those that a rollout records where the policy
gives the demonstrated answers; each picture is what the env looked like when its answer was given.
"""

import asyncio
from typing import Any, NamedTuple

import numpy as np
import torch

from offbeat.envs import registry
from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.errors import RolloutError
from offbeat.services.messages.types import (
    Completion,
    EpisodeKind,
    EpisodeTask,
    Picture,
    Sampling,
    Trajectory,
    VersionSpan,
)
from offbeat.services.rollout.config import CustomEnv
from offbeat.services.rollout.envs.runners import StepResult, do_picture, traits_of
from offbeat.services.rollout.episodes.episode import EpisodePlan, play
from offbeat.trainer.warm_start.demonstrations import (
    Demonstrate,
    Demonstration,
    Play,
    no_room,
    play_once,
    taken_apart,
)


def shown_demonstrator(demos: Play, env: CustomEnv, chat: ChatFormat, *, max_tokens: int) -> Demonstrate:
    """What plays episodes by `demos` and shows them. max_tokens: as `sequence_length` of a rollout.

    Raises:
        ValueError: there is no such env, or the policy reads no pictures.
    """
    player = registry.make(env.env_type, env.env_config)
    traits = traits_of(player)
    task = EpisodeTask(EpisodeKind.TRAIN, "0", 0, 0, 0, 0)
    sampling = Sampling(max_new_tokens=env.max_tokens_per_step)
    plan = EpisodePlan(task, "", 0, env, max_tokens, sampling, False, "demonstrator")

    def demonstrate(rng: np.random.Generator) -> list[Demonstration]:
        watched = _RecordingEnv(player)
        _, turns = taken_apart(play_once(demos, watched, rng, env))
        if [message["content"] for message in turns[1::2]] != watched.answers:
            raise ValueError(
                "warm_start.demos: of a tag that shows pictures, a demonstration's answers must be those that it gave "
                f"env.step since its last reset: it tells {[each['content'] for each in turns[1::2]]}, and gave "
                f"{watched.answers}"
            )
        again = _ReplayedEpisode(watched, chat, env.max_tokens_per_step)
        try:
            trajectory = asyncio.run(play(plan, again, traits, again.answer, chat))
        except RolloutError as error:
            raise ValueError(f"warm start: a demonstration can't be shown to the policy: {error}") from error
        return _demonstrations(trajectory)

    return demonstrate


def _demonstrations(trajectory: Trajectory) -> list[Demonstration]:
    """Raises ValueError where there was no room for an answer."""
    answered = [segment for segment in trajectory.segments if segment.loss_mask.any()]
    if not answered:
        raise no_room(len(trajectory.segments[0].tokens))
    return [
        Demonstration(
            torch.from_numpy(segment.tokens.astype(np.int64)),
            torch.from_numpy(np.flatnonzero(segment.loss_mask)),
            segment.pictures,
        )
        for segment in answered
    ]


class _RecordedStep(NamedTuple):
    """What the env said to an answer, or at first, and looked like then; an episode that is over shows nothing."""

    result: StepResult
    png: bytes


class _RecordingEnv:
    """An env that keeps what it was told, said and looked like since its last reset; all else of it is its own."""

    def __init__(self, env: registry.TextEnv) -> None:
        self._env = env
        self.answers: list[str] = []
        self.seen: list[_RecordedStep] = []

    def reset(self, **how: Any) -> tuple[Any, dict[str, Any]]:
        """As the env's; forgets the episode before."""
        observation, info = self._env.reset(**how)
        self.answers = []
        self.seen = [_RecordedStep(StepResult(observation, 0.0, False, False, {}), do_picture(self._env))]
        return observation, info

    def step(self, action: str) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """As the env's."""
        observation, reward, terminated, truncated, info = self._env.step(action)
        self.answers.append(action)
        over = bool(terminated or truncated)
        result = StepResult(observation, float(reward), bool(terminated), bool(truncated), {})
        self.seen.append(_RecordedStep(result, b"" if over else do_picture(self._env)))
        return observation, reward, terminated, truncated, info

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


class _ReplayedEpisode:
    """A watched episode once more: its env, which says what it said, and who answers it."""

    def __init__(self, watched: _RecordingEnv, chat: ChatFormat, max_tokens: int) -> None:
        self._answers = watched.answers
        self._seen = watched.seen
        self._chat = chat
        self._max_tokens = max_tokens
        self._at = 0

    async def reset(self, seed: int) -> str:
        del seed
        return self._seen[0].result.observation

    async def step(self, action: str) -> StepResult:
        """See `PlayableEnv`; the episode is over where the demonstration is."""
        del action
        self._at += 1
        result = self._seen[self._at].result
        return result._replace(truncated=result.truncated or self._at == len(self._answers))

    async def picture(self) -> bytes:
        return self._seen[self._at].png

    async def answer(self, _: tuple[int, ...], most: int, __: tuple[Picture, ...] = ()) -> Completion:
        """See `Sample`. Raises ValueError where the policy could not give the demonstrated answer."""
        said = self._answers[self._at]
        words = self._chat.encode(said)
        if (read := self._chat.answer(words)).split() != said.split():
            raise ValueError(f"warm start: the answer {said!r} is {read!r} in the policy's tokens")
        if len(words) > self._max_tokens:
            raise ValueError(
                f"warm start: the answer {said!r} takes {len(words)} tokens, and max_tokens_per_step allows "
                f"{self._max_tokens}"
            )
        ids = (*words, self._chat.end_id)[:most]
        return Completion("", ids, (0.0,) * len(ids), (VersionSpan(0, len(ids), 0),))
