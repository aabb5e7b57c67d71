"""Episode loop, independent of Ray and Redis.

Trajectory-wise (ROLL's semantics), history stays in context, unless the chat template rewrites it; step-wise, prompts
are independent.
"""

import operator
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from offbeat.envs.dataset.prompt import RowPrompt
from offbeat.envs.prompts import IMAGE, ROW_IMAGE, fill_template
from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.errors import EpisodeError, RolloutError
from offbeat.services.messages.types import (
    Completion,
    EpisodeTask,
    Sampling,
    Segment,
    StopReason,
    Trajectory,
    Turn,
)
from offbeat.services.rollout.config import CustomEnv
from offbeat.services.rollout.envs.runners import EnvTraits, Opening, StepResult
from offbeat.services.rollout.episodes.conversations import Conversations, seat_metrics
from offbeat.services.rollout.episodes.errors import error_metrics, reward_of
from offbeat.services.rollout.episodes.history import TurnHistory
from offbeat.services.rollout.episodes.recorder import TurnMessage, make_recorder
from offbeat.services.rollout.episodes.state_hash import hash_state
from offbeat.services.rollout.episodes.transcript import Transcript

Sample = Callable[..., Awaitable[Completion]]
"""(prompt token ids, maximum new tokens[, images]) -> completion."""


class PlayableEnv(Protocol):
    async def reset(self, seed: int) -> Opening: ...

    async def step(self, action: str) -> StepResult: ...

    async def image(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class EpisodePlan:
    task: EpisodeTask
    tag: str
    seed: int
    env: CustomEnv
    sequence_length: int
    sampling: Sampling
    keep_text: bool
    worker_id: str
    prompt: RowPrompt | None = None
    """Its last message is the first observation."""
    prompt_length: int | None = None
    transcript: Transcript | None = None
    """To be filled; None: no reward reads the episode."""

    def system_prompt(self, traits: EnvTraits) -> str:
        """Return the row's system message with the tools' instructions, or the tag's system prompt."""
        own = None if self.prompt is None else self.prompt.system
        if own is None:
            return self.env.system_prompt(traits.system_prompt)
        return "\n".join(text for text in (own, traits.tool_instructions) if text)

    @property
    def opening(self) -> tuple[str, ...]:
        """Return texts of user and assistant before the first observation."""
        return () if self.prompt is None else self.prompt.turns[:-1]


async def play(plan: EpisodePlan, env: PlayableEnv, traits: EnvTraits, sample: Sample, chat: ChatFormat) -> Trajectory:
    """Run an episode.

    Raises:
        EpisodeError: env or generation failed; retry.
    """
    began, rules = time.monotonic(), plan.env
    system = plan.system_prompt(traits)
    texts = [_show_images(text, plan, chat) for text in plan.opening]
    make = partial(make_recorder, chat, rules, system, tuple(traits.functions), texts)
    conversations = Conversations(make, rules, traits.seats)
    if plan.transcript is not None:
        plan.transcript.begin(system, plan.opening, () if plan.prompt is None else plan.prompt.images)
    episode = _Episode(
        plan, env, sample, chat, conversations, EpisodeMetrics(traits.metrics_agg_mode, traits.seats), [system]
    )
    await conversations.of(traits.seats[0] if traits.seats else "")  # an unusable template fails before the reset
    opening, step, stop = await env.reset(plan.seed), 0, None
    episode.note_row(opening.row)
    while stop is None:
        step += 1
        opening, stop = await episode.turn(opening, step)
    turns, segments, seats = conversations.record()
    metrics = {**episode.metrics.values(), **conversations.metrics()}
    return Trajectory(
        group_id=plan.task.group_id,
        index=plan.task.index,
        attempt=plan.task.attempt,
        tag=plan.tag,
        seed=plan.seed,
        segments=segments,
        turns=turns,
        stop_reason=stop,
        metrics={
            **metrics,
            **error_metrics(plan.env, metrics, episode.error),
            **length_metrics(turns),
            **_segment_metrics(segments),
        },
        worker_id=plan.worker_id,
        duration_s=time.monotonic() - began,
        text=tuple(episode.text) if plan.keep_text else (),
        error=str(episode.error or ""),
        seats=seats,
    )


@dataclass(slots=True)
class _Episode:
    """State between turns, kept small: thousands of episodes run concurrently."""

    plan: EpisodePlan
    env: PlayableEnv
    sample: Sample
    chat: ChatFormat
    conversations: Conversations
    metrics: "EpisodeMetrics"
    text: list[str]
    error: EpisodeError | None = None

    async def turn(self, opening: Opening, step: int) -> tuple[Opening, StopReason | None]:
        plan, (observation, seat, _) = self.plan, opening
        recorder, history = await self.conversations.of(seat)
        message = await self._message(observation, step, history)
        prompt, images = recorder.ask(message)
        room = plan.sequence_length - len(prompt)
        is_too_long = step == 1 and plan.prompt_length is not None and len(prompt) > plan.prompt_length
        if room < 1 or is_too_long:
            return opening, StopReason.MAX_LENGTH
        max_new_tokens = min(plan.env.max_tokens_per_step, plan.sampling.max_new_tokens, room)
        completion = await (
            self.sample(prompt, max_new_tokens, images) if images else self.sample(prompt, max_new_tokens)
        )
        answer = recorder.add_completion(completion)
        result = await self._step(answer)
        self.conversations.add_step(seat, result, hash_state(observation, b"".join(message.images)))
        self.metrics.add(seat_metrics(result))
        history.add(observation, answer)
        if plan.keep_text:
            self.text += [message.words, answer]
        self._note_turn(message, answer)
        self.note_row(result.row)
        stop = StopReason.ERROR if self.error else _stop_reason(result, step, plan.env.max_steps)
        return Opening(result.observation, result.seat), stop

    def note_row(self, row: Mapping[str, object]) -> None:
        if self.plan.transcript is not None:
            self.plan.transcript.row.update(row)

    def _note_turn(self, message: TurnMessage, answer: str) -> None:
        """Add a turn to the transcript; step-wise prompts repeat earlier turns, so that their observation is taken."""
        transcript, rules = self.plan.transcript, self.plan.env
        if transcript is None:
            return
        images = message.images
        if rules.env_manager_cls != "TrajEnvManager":
            text = ROW_IMAGE * len(images) + message.observation
        elif images:
            text = message.words.replace(self.chat.image_tokens.mark, ROW_IMAGE)
            images = images[-text.count(ROW_IMAGE) :]  # of a first turn, those of the opening come before
        else:
            text = message.words
        transcript.add("user", text, images)
        transcript.add("assistant", answer)

    async def _step(self, answer: str) -> StepResult:
        try:
            return await self.env.step(answer)
        except EpisodeError as error:
            reward = reward_of(self.plan.env.on_env_error, error)
            self.error = error
            return StepResult("", reward, True, False, {})

    async def _message(self, observation: str, step: int, history: TurnHistory) -> TurnMessage:
        rules = self.plan.env
        words = fill_template(
            rules.agent_template,
            observation=history.render_observation(observation),
            step=step,
            actions_left=rules.max_steps - step + 1,
            history=history.render_history(),
            image=self.chat.image_tokens.mark if rules.shows_images else IMAGE,
        )
        if rules.shows_images:
            return TurnMessage(words, (await self.env.image(),) * rules.agent_template.count(IMAGE), observation)
        if step > 1 or self.plan.prompt is None or not self.plan.prompt.images:
            return TurnMessage(words, observation=observation)
        return TurnMessage(_show_images(words, self.plan, self.chat), self.plan.prompt.images, observation)


def _show_images(text: str, plan: EpisodePlan, chat: ChatFormat) -> str:
    """Replace the marks of a row's images by the chat template's placeholder."""
    if plan.prompt is None or not plan.prompt.images:
        return text
    try:
        return text.replace(ROW_IMAGE, chat.image_tokens.mark)
    except RolloutError as error:
        raise EpisodeError("bad_image", str(error)) from error


def _stop_reason(result: StepResult, step: int, max_steps: int) -> StopReason | None:
    if result.terminated:
        return StopReason.TERMINATED
    if result.truncated:
        return StopReason.TRUNCATED
    return StopReason.MAX_STEPS if step >= max_steps else None


def length_metrics(turns: Sequence[Turn]) -> dict[str, float]:
    count = max(len(turns), 1)
    return {
        "num_actions": float(len(turns)),
        "response_length": sum(turn.end - turn.start for turn in turns) / count,
        "truncated_ratio": sum(turn.is_truncated for turn in turns) / count,
    }


def _segment_metrics(segments: Sequence[Segment]) -> dict[str, float]:
    return {"segments": float(len(segments))} if len(segments) > 1 else {}


REDUCTIONS: Mapping[str, Callable[[float, float], float]] = {
    "mean": operator.add,  # divided by their number at the end
    "sum": operator.add,
    "first": lambda value, _: value,
    "last": lambda _, new: new,
    "min": min,
    "max": max,
}
"""`metrics_agg_mode` -> (accumulated, new) -> accumulated."""


class EpisodeMetrics:
    """Env metrics, aggregated as declared, a seat's (`SEAT/NAME`) as `NAME`; by default `success` last, others mean."""

    __slots__ = ("_counts", "_modes", "_seats", "_values")

    def __init__(self, modes: Mapping[str, str], seats: Sequence[str] = ()) -> None:
        """Raises EpisodeError for an unknown mode."""
        for name, mode in modes.items():
            if mode not in REDUCTIONS:
                raise EpisodeError(
                    "bad_metric", f"metrics_agg_mode {mode!r} of {name!r} is none of {', '.join(REDUCTIONS)}"
                )
        self._modes = modes
        self._seats = seats
        self._values: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def add(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            count = self._counts.get(name, 0)
            self._values[name] = REDUCTIONS[self._mode(name)](self._values[name], value) if count else value
            self._counts[name] = count + 1

    def values(self) -> dict[str, float]:
        return {
            name: value / self._counts[name] if self._mode(name) == "mean" else value
            for name, value in self._values.items()
        }

    def _mode(self, name: str) -> str:
        if name in self._modes:
            return self._modes[name]
        seat, _, rest = name.rpartition("/")
        name = rest if seat in self._seats else name
        return self._modes.get(name, "last" if name == "success" else "mean")
