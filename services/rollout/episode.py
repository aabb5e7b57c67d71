"""One episode, trajectory-wise (ROLL's semantics): the whole history stays in context, as the tokens that were sampled.

Invariants: a turn's prompt is the tokens of all before it, plus what the chat template puts between; nothing is encoded
again. The recorded sequence ends with the last answer. Pure of Ray and Redis.
"""

import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Protocol

import numpy as np

from envs.prompting import IMAGE, fill_template
from services.rollout.chat import ChatFormat
from services.rollout.config import CustomEnv
from services.rollout.execution import EnvTraits, StepResult
from services.rollout.failures import EpisodeError
from services.schema import (
    Completion,
    EpisodeTask,
    Picture,
    Sampling,
    Segment,
    StopReason,
    Trajectory,
    Turn,
    VersionSpan,
)

Sample = Callable[..., Awaitable[Completion]]
"""(prompt, most new tokens) -> completion, the prompt's pictures as a third argument where it has any; retries and timeouts
are its business."""


class PlayableEnv(Protocol):
    """What an episode asks of its env."""

    async def reset(self, seed: int) -> str: ...

    async def step(self, action: str) -> StepResult: ...

    async def picture(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class EpisodePlan:
    """What is played and by which rules."""

    task: EpisodeTask
    tag: str
    seed: int
    env: CustomEnv
    sequence_length: int
    sampling: Sampling
    keep_text: bool
    worker_id: str


class EpisodeRecorder:
    """The growing token sequence of an episode and what is known about each token."""

    def __init__(self, end_id: int) -> None:
        self.tokens: list[int] = []
        self.turns: list[Turn] = []
        self.pictures: list[Picture] = []
        self._end_id = end_id
        self._logprobs: list[tuple[int, tuple[float, ...]]] = []
        self._spans: list[VersionSpan] = []

    def add_prompt(self, ids: tuple[int, ...], pictures: Sequence[Picture] = ()) -> None:
        """Tokens that nobody sampled, and the pictures among them; an answer that was cut short is ended first."""
        if self.turns and self.tokens[-1] != self._end_id:
            self.tokens.append(self._end_id)
        before = len(self.tokens)
        self.pictures += [replace(picture, start=before + picture.start) for picture in pictures]
        self.tokens.extend(ids)

    def add_answer(self, completion: Completion) -> None:
        """Tokens that the policy sampled.

        Raises:
            EpisodeError: logprobs or versions do not belong to the tokens one by one.
        """
        start, count = len(self.tokens), len(completion.token_ids)
        _check(completion)
        self.tokens.extend(completion.token_ids)
        self._logprobs.append((start, completion.logprobs))
        for span in completion.versions:
            last = self._spans[-1] if self._spans else None
            if last is not None and last.end == start + span.start and last.version == span.version:
                self._spans[-1] = VersionSpan(last.start, start + span.end, span.version)
            else:
                self._spans.append(VersionSpan(start + span.start, start + span.end, span.version))
        self.turns.append(Turn(0, start, start + count, 0.0))

    def rate_answer(self, reward: float, state_hash: str) -> None:
        """What the env said to the last answer."""
        turn = self.turns[-1]
        self.turns[-1] = Turn(turn.segment, turn.start, turn.end, reward, state_hash)

    def segment(self) -> Segment:
        """The sequence, up to the last answer if there is one."""
        length = self.turns[-1].end if self.turns else len(self.tokens)
        mask = np.zeros(length, dtype=np.bool_)
        logprobs = np.zeros(length, dtype=np.float32)
        for start, values in self._logprobs:
            mask[start : start + len(values)] = True
            logprobs[start : start + len(values)] = values
        pictures = tuple(picture for picture in self.pictures if picture.start + picture.count <= length)
        return Segment(np.array(self.tokens[:length], dtype=np.int32), mask, logprobs, tuple(self._spans), pictures)


async def play(plan: EpisodePlan, env: PlayableEnv, traits: EnvTraits, sample: Sample, chat: ChatFormat) -> Trajectory:
    """Play an episode to its end.

    Raises:
        EpisodeError: env or generation failed; the episode should be tried again.
    """
    began, rules = time.monotonic(), plan.env
    system = traits.system_prompt if rules.agent_system_template is None else rules.agent_system_template
    recorder, metrics, text = EpisodeRecorder(chat.end_id), EpisodeMetrics(traits.metrics_agg_mode), [system]
    observation = await env.reset(plan.seed)
    while True:
        step = len(recorder.turns) + 1
        message = fill_template(
            rules.agent_template,
            observation=observation,
            step=step,
            actions_left=rules.max_steps - step + 1,
            image=chat.sight.mark if rules.shows_pictures else IMAGE,
        )
        ids = chat.next_prompt(message) if recorder.turns else chat.first_prompt(system, message)
        png, pictures = b"", ()
        if rules.shows_pictures:
            png = await env.picture()
            ids, pictures = chat.sight.place(ids, png, rules.agent_template.count(IMAGE))
        recorder.add_prompt(ids, pictures)
        room = plan.sequence_length - len(recorder.tokens)
        if room < 1:
            stop = StopReason.MAX_LENGTH
            break
        most = min(rules.max_tokens_per_step, plan.sampling.max_new_tokens, room)
        seen = (tuple(recorder.pictures),) if recorder.pictures else ()
        completion = await sample(tuple(recorder.tokens), most, *seen)
        recorder.add_answer(completion)
        answer = chat.answer(completion.token_ids)
        anchor = blake2b(observation.encode() + png, digest_size=8).hexdigest()
        result = await env.step(answer)
        recorder.rate_answer(result.reward, anchor)
        metrics.add(result.metrics)
        if plan.keep_text:
            text += [message, answer]
        observation = result.observation
        if ended := _stop_reason(result, step, rules.max_steps):
            stop = ended
            break
    return Trajectory(
        group_id=plan.task.group_id,
        index=plan.task.index,
        attempt=plan.task.attempt,
        tag=plan.tag,
        seed=plan.seed,
        segments=(recorder.segment(),),
        turns=tuple(recorder.turns),
        stop_reason=stop,
        metrics={**metrics.values(), **_length_metrics(recorder)},
        worker_id=plan.worker_id,
        duration_s=time.monotonic() - began,
        text=tuple(text) if plan.keep_text else (),
    )


def _stop_reason(result: StepResult, step: int, max_steps: int) -> StopReason | None:
    if result.terminated:
        return StopReason.TERMINATED
    if result.truncated:
        return StopReason.TRUNCATED
    return StopReason.MAX_STEPS if step >= max_steps else None


def _length_metrics(recorder: EpisodeRecorder) -> dict[str, float]:
    sampled = sum(turn.end - turn.start for turn in recorder.turns)
    return {"num_actions": float(len(recorder.turns)), "response_length": sampled / max(len(recorder.turns), 1)}


def _check(completion: Completion) -> None:
    count, covered = len(completion.token_ids), 0
    for span in completion.versions:
        if span.start != covered or span.end <= span.start:
            raise EpisodeError("generation_invalid", f"version spans {completion.versions} of {count} tokens")
        covered = span.end
    if not count or covered != count or len(completion.logprobs) != count:
        raise EpisodeError(
            "generation_invalid", f"{count} tokens, {len(completion.logprobs)} logprobs, versions for {covered}"
        )
    if not all(map(math.isfinite, completion.logprobs)):
        raise EpisodeError("generation_invalid", "a logprob that is not finite")


class EpisodeMetrics:
    """Env metrics of the turns, put together by the env's rules: `success` last, others their mean."""

    def __init__(self, modes: Mapping[str, str]) -> None:
        self._modes = {"success": "last", **modes}
        self._seen: dict[str, list[float]] = {}

    def add(self, metrics: Mapping[str, float]) -> None:
        """One turn's metrics."""
        for name, value in metrics.items():
            self._seen.setdefault(name, []).append(value)

    def values(self) -> dict[str, float]:
        """The episode's. Raises EpisodeError if the env names an aggregation that does not exist."""
        return {name: self._aggregate(name, seen) for name, seen in self._seen.items()}

    def _aggregate(self, name: str, seen: list[float]) -> float:
        match self._modes.get(name, "mean"):
            case "mean":
                return sum(seen) / len(seen)
            case "last":
                return seen[-1]
            case "first":
                return seen[0]
            case "sum":
                return sum(seen)
            case "min":
                return min(seen)
            case "max":
                return max(seen)
            case other:
                raise EpisodeError("bad_metric", f"metrics_agg_mode {other!r} of {name!r} does not exist")
