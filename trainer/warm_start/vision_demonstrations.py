"""Demonstrated episodes with images.

Invariants: tokens, images and loss positions (answers only) are a rollout's; each image is the frame before its answer.
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
    PromptImage,
    Sampling,
    Trajectory,
    VersionSpan,
)
from offbeat.services.rollout.config import CustomEnv
from offbeat.services.rollout.envs.runners import Opening, StepResult, read_traits, render_png
from offbeat.services.rollout.episodes.episode import EpisodePlan, play
from offbeat.trainer.warm_start.demonstrations import (
    Demonstrate,
    Demonstration,
    Demos,
    prompt_too_long_error,
    run_demo,
    split_messages,
)


def make_vision_demonstrator(demos: Demos, env: CustomEnv, chat: ChatFormat, *, max_tokens: int) -> Demonstrate:
    """Build a demonstrator with images.

    Raises:
        ValueError: the env does not exist, or the policy lacks image input.
    """
    instance = registry.make(env.env_type, env.env_config)
    traits = read_traits(instance)
    task = EpisodeTask(EpisodeKind.TRAIN, "0", 0, 0, 0, 0)
    sampling = Sampling(max_new_tokens=env.max_tokens_per_step)
    plan = EpisodePlan(task, "", 0, env, max_tokens, sampling, False, "demonstrator")

    def demonstrate(rng: np.random.Generator) -> list[Demonstration]:
        recording = _RecordingEnv(instance)
        _, turns = split_messages(run_demo(demos, recording, rng, env))
        answers = [message["content"] for message in turns[1::2]]
        if answers != recording.answers:
            raise ValueError(
                "warm_start.demos: for an env with images, the returned answers must equal the actions passed to env.step "
                f"since the last reset: returned {answers}, passed {recording.answers}"
            )
        replayed = _ReplayedEpisode(recording, chat, env.max_tokens_per_step)
        try:
            trajectory = asyncio.run(play(plan, replayed, traits, replayed.answer, chat))
        except RolloutError as error:
            raise ValueError(f"warm start: a demonstration can't be rendered for the policy: {error}") from error
        return _to_demonstrations(trajectory)

    return demonstrate


def _to_demonstrations(trajectory: Trajectory) -> list[Demonstration]:
    answered = [segment for segment in trajectory.segments if segment.loss_mask.any()]
    if not answered:
        raise prompt_too_long_error(len(trajectory.segments[0].tokens))
    return [
        Demonstration(
            torch.from_numpy(segment.tokens.astype(np.int64)),
            torch.from_numpy(np.flatnonzero(segment.loss_mask)),
            segment.images,
        )
        for segment in answered
    ]


class _RecordedStep(NamedTuple):
    """Result and next frame (empty at the end)."""

    result: StepResult
    png: bytes


class _RecordingEnv:
    def __init__(self, env: registry.TextEnv) -> None:
        self._env = env
        self.answers: list[str] = []
        self.steps: list[_RecordedStep] = []

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self._env.reset(**kwargs)
        self.answers = []
        self.steps = [_RecordedStep(StepResult(observation, 0.0, False, False, {}), render_png(self._env))]
        return observation, info

    def step(self, action: str) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self._env.step(action)
        self.answers.append(action)
        is_done = bool(terminated or truncated)
        result = StepResult(observation, float(reward), bool(terminated), bool(truncated), {})
        self.steps.append(_RecordedStep(result, b"" if is_done else render_png(self._env)))
        return observation, reward, terminated, truncated, info

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


class _ReplayedEpisode:
    def __init__(self, recording: _RecordingEnv, chat: ChatFormat, max_tokens: int) -> None:
        self._answers = recording.answers
        self._steps = recording.steps
        self._chat = chat
        self._max_tokens = max_tokens
        self._index = 0

    async def reset(self, seed: int) -> Opening:
        del seed
        return Opening(self._steps[0].result.observation)

    async def step(self, action: str) -> StepResult:
        """Return the recorded result, truncated after the last answer."""
        del action
        self._index += 1
        result = self._steps[self._index].result
        return result._replace(truncated=result.truncated or self._index == len(self._answers))

    async def image(self) -> bytes:
        return self._steps[self._index].png

    async def answer(self, _: tuple[int, ...], room: int, __: tuple[PromptImage, ...] = ()) -> Completion:
        text = self._answers[self._index]
        tokens = self._chat.encode(text)
        if (decoded := self._chat.answer(tokens)).split() != text.split():
            raise ValueError(f"warm start: the answer {text!r} is {decoded!r} in the policy's tokens")
        if len(tokens) > self._max_tokens:
            raise ValueError(
                f"warm start: the answer {text!r} takes {len(tokens)} tokens; max_tokens_per_step is {self._max_tokens}"
            )
        ids = (*tokens, self._chat.end_id)[:room]
        return Completion("", ids, (0.0,) * len(ids), (VersionSpan(0, len(ids), 0),))
