"""Runs one episode and traces each turn: observation, prompt tokens, completion, action, reward."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import typer

from offbeat.deploy.play.target import PlayTarget
from offbeat.deploy.report.episodes import (
    Picture,
    PlayedEpisode,
    RecordedEpisode,
    picture_of,
)
from offbeat.envs.registry import TextEnv
from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.messages.types import (
    Completion,
    EpisodeKind,
    EpisodeTask,
    Sampling,
    Trajectory,
)
from offbeat.services.messages.types import Picture as Shown
from offbeat.services.rollout.envs.runners import (
    StepResult,
    do_picture,
    do_reset,
    do_step,
    traits_of,
)
from offbeat.services.rollout.episodes.episode import EpisodePlan, Sample, play

Tell = Callable[[str], None]


@dataclass
class TracedEnv:
    """An env on this loop; keeps what it showed."""

    env: TextEnv
    tell: Tell
    observations: list[str] = field(default_factory=list[str])
    answers: list[str] = field(default_factory=list[str])
    pictures: list[Picture | None] = field(default_factory=list["Picture | None"])

    async def reset(self, seed: int) -> str:
        observation = do_reset(self.env, seed)
        self._seen(observation)
        return observation

    async def picture(self) -> bytes:
        return do_picture(self.env)

    async def step(self, action: str) -> StepResult:
        result = do_step(self.env, action)
        self.answers.append(action)
        self.tell(_line("action", repr(action)))
        metrics = "  ".join(f"{name} {value:g}" for name, value in result.metrics.items())
        self.tell(_line("reward", f"{result.reward:g}", metrics))
        self._seen(result.observation)
        return result

    def _seen(self, observation: str) -> None:
        self.observations.append(observation)
        self.pictures.append(picture_of(self.env))


class TracedSampler:
    """Traces each turn's prompt and completion."""

    def __init__(self, sample: Sample, chat: ChatFormat, env: TracedEnv, tell: Tell, *, show_tokens: bool) -> None:
        self._sample, self._chat, self._env, self._tell = sample, chat, env, tell
        self._show_tokens = show_tokens
        self._said: tuple[int, ...] = ()
        self._turn = 0

    async def __call__(self, prompt: Sequence[int], most: int, pictures: tuple[Shown, ...] = ()) -> Completion:
        self._turn += 1
        self._tell(typer.style(f"-- turn {self._turn} " + "-" * 40, dim=True))
        self._tell(self._env.observations[-1])
        if self._show_tokens:
            known = len(self._said) if tuple(prompt[: len(self._said)]) == self._said else 0
            told = f"{len(prompt) - known} new of {len(prompt)}"
            self._tell(_line("prompt", told, self._prompt_pieces(prompt, known, pictures)))
        elif pictures:
            self._tell(_line("picture", f"{len(pictures[-1].png)} bytes of PNG"))
        completion = await (self._sample(prompt, most, pictures) if pictures else self._sample(prompt, most))
        self._said = (*prompt, *completion.token_ids)
        if self._show_tokens:
            logprob = sum(completion.logprobs)
            told = f"{len(completion.token_ids)} tokens, logprob {logprob:.3f}, {completion.finish_reason.value}"
            self._tell(_line("completion", told, self._pieces(completion.token_ids)))
        return completion

    def _prompt_pieces(self, prompt: Sequence[int], known: int, pictures: tuple[Shown, ...]) -> str:
        """Return the new part of the prompt, each image's tokens as one."""
        pieces: list[str] = []
        for picture in pictures:
            if picture.start >= known:
                name = self._chat.token_text(prompt[picture.start])
                pieces.append(self._pieces(prompt[known : picture.start]))
                pieces.append(f"[picture: {picture.count} x {prompt[picture.start]}:{name!r}]")
                known = picture.start + picture.count
        return " ".join([*pieces, self._pieces(prompt[known:])])

    def _pieces(self, ids: Sequence[int]) -> str:
        return " ".join(f"{number}:{self._chat.token_text(number)!r}" for number in ids)


async def watch(
    setting: PlayTarget,
    env: TextEnv,
    sample: Sample,
    chat: ChatFormat,
    *,
    seed: int,
    show_tokens: bool,
    tell: Tell,
) -> tuple[Trajectory, PlayedEpisode]:
    """Run one episode with a trace.

    Raises:
        EpisodeError: the policy's output is not a completion.
    """
    watched = TracedEnv(env, tell)
    traits = traits_of(env)
    tell(f"{setting.tag}, seed {seed}; at most {setting.env.max_steps} turns")
    system = setting.env.agent_system_template
    tell(_line("system", repr(traits.system_prompt if system is None else system)))
    for function in traits.functions:
        tell(_line("function", json.dumps(function["function"], ensure_ascii=False)))
    sampling = Sampling(setting.temperature, setting.top_p, setting.top_k, setting.max_new_tokens, chat.stop_ids)
    task = EpisodeTask(EpisodeKind.EVAL, "play", 0, 0, 0, 0)
    plan = EpisodePlan(task, setting.tag, seed, setting.env, setting.sequence_length, sampling, True, "play")
    told = TracedSampler(sample, chat, watched, tell, show_tokens=show_tokens)
    trajectory = await play(plan, watched, traits, told, chat)
    tell(typer.style("-- end " + "-" * 43, dim=True))
    tell(watched.observations[-1])
    metrics = "  ".join(f"{name} {value:g}" for name, value in trajectory.metrics.items())
    tell(_line("stop", trajectory.stop_reason.value, f"reward {trajectory.reward:g}  {metrics}"))
    return trajectory, _played(setting, seed, watched, trajectory)


def _played(setting: PlayTarget, seed: int, watched: TracedEnv, trajectory: Trajectory) -> PlayedEpisode:
    success = trajectory.metrics.get("success")
    recorded = RecordedEpisode(
        title="played",
        tag=setting.tag,
        seed=seed,
        answers=tuple(watched.answers),
        reward=trajectory.reward,
        success=None if success is None else success > 0,
    )
    drawn = tuple(picture for picture in watched.pictures if isinstance(picture, np.ndarray))
    whole = drawn if len(drawn) == len(watched.pictures) else ()
    return PlayedEpisode(recorded, tuple(watched.observations), whole)


def _line(name: str, *parts: str) -> str:
    return typer.style(f"{name:11}", fg=typer.colors.CYAN) + "  ".join(part for part in parts if part)
