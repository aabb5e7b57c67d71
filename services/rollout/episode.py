"""One episode: the env and the policy in turn, until one of them has had enough.

Trajectory-wise (ROLL's semantics) the whole history stays in context, as the tokens that were sampled, or as the chat
template rewrites it; step-wise each prompt stands for itself. `conversation` records it. Pure of Ray and Redis.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from envs.prompting import IMAGE, fill_template
from services.rollout.chat import ChatFormat
from services.rollout.config import CustomEnv
from services.rollout.conversation import Message, conversation
from services.rollout.execution import EnvTraits, StepResult
from services.rollout.failures import EpisodeError
from services.rollout.past import Past
from services.schema import (
    Completion,
    EpisodeTask,
    Sampling,
    Segment,
    StopReason,
    Trajectory,
    Turn,
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


async def play(plan: EpisodePlan, env: PlayableEnv, traits: EnvTraits, sample: Sample, chat: ChatFormat) -> Trajectory:
    """Play an episode to its end.

    Raises:
        EpisodeError: env or generation failed; the episode should be tried again.
    """
    began, rules = time.monotonic(), plan.env
    system = traits.system_prompt if rules.agent_system_template is None else rules.agent_system_template
    told = await conversation(chat, rules, system, tuple(traits.functions))
    metrics, text = EpisodeMetrics(traits.metrics_agg_mode), [system]
    past = Past(rules)
    observation = await env.reset(plan.seed)
    while True:
        step = len(past) + 1
        message = await _message(rules, env, past, observation, chat)
        prompt, pictures = told.ask(message)
        room = plan.sequence_length - len(prompt)
        if room < 1:
            stop = StopReason.MAX_LENGTH
            break
        most = min(rules.max_tokens_per_step, plan.sampling.max_new_tokens, room)
        completion = await (sample(prompt, most, pictures) if pictures else sample(prompt, most))
        answer = told.hear(completion)
        anchor = blake2b(observation.encode() + message.png, digest_size=8).hexdigest()
        result = await env.step(answer)
        told.rate(result.reward, anchor)
        metrics.add(result.metrics)
        past.add(observation, answer)
        if plan.keep_text:
            text += [message.words, answer]
        observation = result.observation
        if ended := _stop_reason(result, step, rules.max_steps):
            stop = ended
            break
    turns, segments = told.record()
    return Trajectory(
        group_id=plan.task.group_id,
        index=plan.task.index,
        attempt=plan.task.attempt,
        tag=plan.tag,
        seed=plan.seed,
        segments=segments,
        turns=turns,
        stop_reason=stop,
        metrics={**metrics.values(), **_length_metrics(turns, segments)},
        worker_id=plan.worker_id,
        duration_s=time.monotonic() - began,
        text=tuple(text) if plan.keep_text else (),
    )


async def _message(rules: CustomEnv, env: PlayableEnv, past: Past, observation: str, chat: ChatFormat) -> Message:
    """What the policy is told in a turn."""
    step = len(past) + 1
    words = fill_template(
        rules.agent_template,
        observation=past.shown(observation),
        step=step,
        actions_left=rules.max_steps - step + 1,
        history=past.window(),
        image=chat.sight.mark if rules.shows_pictures else IMAGE,
    )
    if not rules.shows_pictures:
        return Message(words, observation=observation)
    return Message(words, await env.picture(), rules.agent_template.count(IMAGE), observation)


def _stop_reason(result: StepResult, step: int, max_steps: int) -> StopReason | None:
    if result.terminated:
        return StopReason.TERMINATED
    if result.truncated:
        return StopReason.TRUNCATED
    return StopReason.MAX_STEPS if step >= max_steps else None


def _length_metrics(turns: Sequence[Turn], segments: Sequence[Segment]) -> dict[str, float]:
    sampled = sum(turn.end - turn.start for turn in turns)
    lengths = {"num_actions": float(len(turns)), "response_length": sampled / max(len(turns), 1)}
    return lengths if len(segments) < 2 else {**lengths, "segments": float(len(segments))}


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
