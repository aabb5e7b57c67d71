"""Frames of a recorded episode, replayed in a process with a time limit."""

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.services.control.console.archive import NotRecordedError
from offbeat.services.control.console.schemas import FramesView
from offbeat.services.errors import EpisodeError
from offbeat.services.rollout.child_process import ChildProcess
from offbeat.services.rollout.config import CustomEnv

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class EpisodeToReplay:
    env: CustomEnv
    seed: int
    answers: Sequence[str]
    digests: Sequence[str]
    """Of the observation before each answer, `Turn.state_hash`."""


def render_frames(episode: EpisodeToReplay) -> FramesView:
    """Return a frame per observation; raises `NotRecordedError` without frames or for another course."""
    if not all(episode.digests):
        raise NotRecordedError("the episode can't be played again: it has no digests of its observations")
    frames, difference = asyncio.run(_ask(episode))
    if difference is not None:
        raise NotRecordedError(
            f"the episode can't be played again: the env's observation of turn {difference} is another one than recorded"
        )
    if not frames:
        raise NotRecordedError(f"{episode.env.env_type} draws no pictures: it has no render_mode rgb_array")
    return FramesView(frames=[base64.b64encode(frame).decode() for frame in frames])


async def _ask(episode: EpisodeToReplay) -> tuple[list[bytes], int | None]:
    child = ChildProcess("offbeat.deploy.console.frames_main", "died")
    arguments = (episode.env.model_dump_json(), episode.seed, list(episode.answers), list(episode.digests))
    try:
        await child.start()
        return await child.ask("render", TIMEOUT_S, *arguments)
    except EpisodeError as error:
        raise NotRecordedError(f"the episode can't be played again: {error}") from error
    finally:
        await child.kill()
