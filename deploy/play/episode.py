"""Episode with a trace of each turn."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import typer

from offbeat.deploy.play.target import PlayTarget
from offbeat.deploy.printable import show_controls
from offbeat.envs.registry import TextEnv
from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.messages.types import (
    Completion,
    EpisodeKind,
    EpisodeTask,
    PromptImage,
    Sampling,
    Trajectory,
)
from offbeat.services.rollout.envs.runners import (
    Opening,
    StepResult,
    call_env,
    do_reset,
    do_step,
    read_traits,
    render_png,
)
from offbeat.services.rollout.episodes.episode import EpisodePlan, Sample, play
from offbeat.trainer.rendering.episodes import (
    Frame,
    PlayedEpisode,
    RecordedEpisode,
    render_frame,
)

WriteLine = Callable[[str], None]


@dataclass
class TracedEnv:
    env: TextEnv
    write: WriteLine
    observations: list[str] = field(default_factory=list[str])
    answers: list[str] = field(default_factory=list[str])
    frames: list[Frame | None] = field(default_factory=list["Frame | None"])

    async def reset(self, seed: int) -> Opening:
        opening = call_env("reset_error", do_reset, self.env, seed)
        self._record_observation(opening.observation)
        return opening

    async def image(self) -> bytes:
        return call_env("image_error", render_png, self.env)

    async def step(self, action: str) -> StepResult:
        result = call_env("step_error", do_step, self.env, action)
        self.answers.append(action)
        self.write(_line("action", repr(action)))
        metrics = "  ".join(f"{name} {value:g}" for name, value in result.metrics.items())
        self.write(_line("reward", f"{result.reward:g}", metrics))
        self._record_observation(result.observation)
        return result

    def _record_observation(self, observation: str) -> None:
        self.observations.append(observation)
        self.frames.append(render_frame(self.env))


class TracedSampler:
    def __init__(
        self, sample: Sample, chat: ChatFormat, env: TracedEnv, write: WriteLine, *, show_tokens: bool
    ) -> None:
        self._sample, self._chat, self._env, self._write = sample, chat, env, write
        self._show_tokens = show_tokens
        self._previous_tokens: tuple[int, ...] = ()
        self._turn = 0

    async def __call__(
        self, prompt: Sequence[int], max_tokens: int, images: tuple[PromptImage, ...] = ()
    ) -> Completion:
        self._turn += 1
        self._write(typer.style(f"-- turn {self._turn} " + "-" * 40, dim=True))
        self._write(show_controls(self._env.observations[-1]))
        if self._show_tokens:
            known = (
                len(self._previous_tokens)
                if tuple(prompt[: len(self._previous_tokens)]) == self._previous_tokens
                else 0
            )
            count = f"{len(prompt) - known} new of {len(prompt)}"
            self._write(_line("prompt", count, self._prompt_pieces(prompt, known, images)))
        elif images:
            self._write(_line("image", f"{len(images[-1].png)} bytes of PNG"))
        completion = await (self._sample(prompt, max_tokens, images) if images else self._sample(prompt, max_tokens))
        self._previous_tokens = (*prompt, *completion.token_ids)
        if self._show_tokens:
            logprob = sum(completion.logprobs)
            summary = f"{len(completion.token_ids)} tokens, logprob {logprob:.3f}, {completion.finish_reason.value}"
            self._write(_line("completion", summary, self._pieces(completion.token_ids)))
        return completion

    def _prompt_pieces(self, prompt: Sequence[int], known: int, images: tuple[PromptImage, ...]) -> str:
        """Render the prompt from token `known` on."""
        pieces: list[str] = []
        for image in images:
            if image.start >= known:
                name = self._chat.token_text(prompt[image.start])
                pieces.append(self._pieces(prompt[known : image.start]))
                pieces.append(f"[image: {image.count} x {prompt[image.start]}:{name!r}]")
                known = image.start + image.count
        return " ".join([*pieces, self._pieces(prompt[known:])])

    def _pieces(self, ids: Sequence[int]) -> str:
        return " ".join(f"{number}:{self._chat.token_text(number)!r}" for number in ids)


async def trace_episode(
    target: PlayTarget,
    env: TextEnv,
    sample: Sample,
    chat: ChatFormat,
    *,
    seed: int,
    show_tokens: bool,
    write: WriteLine,
) -> tuple[Trajectory, PlayedEpisode]:
    """Run one episode with a trace; raises `EpisodeError`."""
    traced = TracedEnv(env, write)
    traits = read_traits(env)
    write(f"{target.tag}, seed {seed}; at most {target.env.max_steps} turns")
    write(_line("system", repr(target.env.system_prompt(traits.system_prompt))))
    for function in traits.functions:
        write(_line("function", json.dumps(function["function"], ensure_ascii=False)))
    sampling = Sampling(target.temperature, target.top_p, target.top_k, target.max_new_tokens, chat.stop_ids)
    task = EpisodeTask(EpisodeKind.EVAL, "play", 0, 0, 0, 0)
    plan = EpisodePlan(task, target.tag, seed, target.env, target.sequence_length, sampling, True, "play")
    sampler = TracedSampler(sample, chat, traced, write, show_tokens=show_tokens)
    trajectory = await play(plan, traced, traits, sampler, chat)
    write(typer.style("-- end " + "-" * 43, dim=True))
    write(show_controls(traced.observations[-1]))
    metrics = "  ".join(f"{name} {value:g}" for name, value in trajectory.metrics.items())
    write(_line("stop", trajectory.stop_reason.value, f"reward {trajectory.reward:g}  {metrics}"))
    return trajectory, _to_played_episode(target, seed, traced, trajectory)


def _to_played_episode(target: PlayTarget, seed: int, traced: TracedEnv, trajectory: Trajectory) -> PlayedEpisode:
    success = trajectory.metrics.get("success")
    recorded = RecordedEpisode(
        title="played",
        tag=target.tag,
        seed=seed,
        answers=tuple(traced.answers),
        reward=trajectory.reward,
        success=None if success is None else success > 0,
    )
    drawn = tuple(frame for frame in traced.frames if isinstance(frame, np.ndarray))
    frames = drawn if len(drawn) == len(traced.frames) else ()
    return PlayedEpisode(recorded, tuple(traced.observations), frames)


def _line(name: str, *parts: str) -> str:
    return typer.style(f"{name:11}", fg=typer.colors.CYAN) + "  ".join(part for part in parts if part)
