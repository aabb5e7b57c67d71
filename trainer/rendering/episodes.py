"""Recorded episodes, replayed as GIF and HTML, as text without `rgb_array`."""

import base64
import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from gymnasium.error import DependencyNotInstalled
from PIL import Image, ImageDraw

from offbeat.envs import registry
from offbeat.services.rollout.config import CustomEnv

Frame = npt.NDArray[np.uint8]
FRAME_MS = 400
HOLD_FRAMES = 3
"""Of the last frame."""
MAX_FRAME_PIXELS = 512
"""Of a side: all frames of an evaluation are in memory at once, beside the learner."""
BORDER = 4
TITLE_HEIGHT = 24
COLORS = {True: (60, 160, 75), False: (200, 60, 60), None: (150, 150, 150)}

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
article { border-top: 1px solid #ccc; padding: 1rem 0; }
.turns { display: flex; flex-wrap: wrap; gap: .75rem; }
figure { margin: 0; max-width: 12rem; }
figcaption, pre { font: 13px/1.35 ui-monospace, monospace; white-space: pre-wrap; }
.good { color: #2b8a3e; } .bad { color: #c92a2a; }
"""


@dataclass(frozen=True, slots=True)
class RecordedEpisode:
    title: str
    """`before training`, `after training`, ..."""
    tag: str
    seed: int
    answers: tuple[str, ...]
    reward: float
    success: bool | None
    held_out: bool = True


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    recorded: RecordedEpisode
    observations: tuple[str, ...]
    """One more than answers."""
    frames: tuple[Frame, ...]
    """One more than answers, or none."""


class EnvsConfig(Protocol):
    @property
    def custom_envs(self) -> Mapping[str, CustomEnv]: ...


def play_again(config: EnvsConfig, recorded: RecordedEpisode) -> PlayedEpisode:
    custom = config.custom_envs[recorded.tag]
    settings = dict(custom.env_config)
    if recorded.held_out:
        settings = registry.held_out_config(custom.env_type, settings)
    env = make_rendered(custom.env_type, settings)
    try:
        observation, _ = env.reset(seed=recorded.seed)
        observations, frames = [str(observation)], [_shrink(render_frame(env))]
        for answer in recorded.answers:
            observation, _, terminated, truncated, _ = env.step(answer)
            observations.append(str(observation))
            frames.append(_shrink(render_frame(env)))
            if terminated or truncated:
                break
    finally:
        env.close()
    drawn = tuple(frame for frame in frames if frame is not None)
    return PlayedEpisode(recorded, tuple(observations), drawn if len(drawn) == len(frames) else ())


def make_rendered(env_type: str, settings: dict[str, Any]) -> registry.TextEnv:
    """Create the env, rendered if supported; raises ValueError."""
    rendering = {**settings, "render_mode": "rgb_array"}
    try:
        return registry.make(env_type, rendering)
    except ValueError:  # no such setting, or render mode
        return registry.make(env_type, settings)


def render_frame(env: registry.TextEnv) -> Frame | None:
    try:
        drawn: Any = env.render()
    except (
        NotImplementedError,
        DependencyNotInstalled,
    ):  # gymnasium's default; its envs draw with libraries of their own
        return None
    if not isinstance(drawn, np.ndarray) or drawn.dtype != np.uint8 or drawn.ndim < 2:
        return None
    if drawn.shape[2:] not in ((), (1,), (3,), (4,)):
        return None
    image = Image.fromarray(drawn[:, :, 0] if drawn.shape[2:] == (1,) else drawn)  # gray, RGB or RGBA
    return np.asarray(image.convert("RGB"))


def _shrink(frame: Frame | None) -> Frame | None:
    if frame is None or max(frame.shape[:2]) <= MAX_FRAME_PIXELS:
        return frame
    image = Image.fromarray(frame)
    image.thumbnail((MAX_FRAME_PIXELS, MAX_FRAME_PIXELS))
    return np.asarray(image)


def write_gif(path: Path, episodes: Sequence[PlayedEpisode], *, columns: int = 4) -> bool:
    """Write episodes with images; return False without any. Frames are gray, finally green or red by success."""
    drawable = [episode for episode in episodes if episode.frames]
    if not drawable:
        return False
    titles = list(dict.fromkeys(episode.recorded.title for episode in drawable))
    blocks = [[episode for episode in drawable if episode.recorded.title == title] for title in titles]
    columns = min(columns, max(len(block) for block in blocks))
    num_frames = max(len(episode.frames) for episode in drawable) + HOLD_FRAMES

    def draw(at: int) -> Image.Image:
        mosaics = [_add_title(title, _mosaic(b, at, columns)) for title, b in zip(titles, blocks, strict=True)]
        width = max(mosaic.shape[1] for mosaic in mosaics)
        padding = [((0, 0), (0, width - mosaic.shape[1]), (0, 0)) for mosaic in mosaics]
        rows = [np.pad(mosaic, pad, constant_values=255) for mosaic, pad in zip(mosaics, padding, strict=True)]
        return Image.fromarray(np.concatenate(rows))

    # One palette for all frames: left to itself, Pillow picks one per frame, and colours flicker.
    palette = draw(num_frames - 1).quantize(64)
    paletted = [draw(at).quantize(palette=palette, dither=Image.Dither.NONE) for at in range(num_frames)]
    paletted[0].save(path, save_all=True, append_images=paletted[1:], duration=FRAME_MS, loop=0, optimize=True)
    return True


def _add_title(title: str, frame: Frame) -> Frame:
    line = Image.new("RGB", (frame.shape[1], TITLE_HEIGHT), "white")
    ImageDraw.Draw(line).text((BORDER, 2), title, fill=(40, 40, 40), font_size=TITLE_HEIGHT - 8)
    return np.concatenate([np.asarray(line, dtype=np.uint8), frame])


def _mosaic(episodes: Sequence[PlayedEpisode], at: int, columns: int) -> Frame:
    """Return a frame of all episodes, [height, width, 3], borders around ended ones."""
    height, width = (
        max(frame.shape[axis] for episode in episodes for frame in episode.frames) + 2 * BORDER for axis in (0, 1)
    )
    rows = -(-len(episodes) // columns)
    canvas = np.full((rows * height, columns * width, 3), 255, dtype=np.uint8)
    for place, episode in enumerate(episodes):
        row, column = divmod(place, columns)
        top, left = row * height, column * width
        ended = at >= len(episode.frames) - 1
        frame = episode.frames[min(at, len(episode.frames) - 1)]
        color = COLORS[episode.recorded.success] if ended else (225, 225, 225)
        canvas[top : top + height, left : left + width] = color
        inner = canvas[top + BORDER : top + BORDER + frame.shape[0], left + BORDER : left + BORDER + frame.shape[1]]
        inner[:] = frame
    return canvas


def write_html(path: Path, episodes: Sequence[PlayedEpisode], *, title: str) -> None:
    """Write a self-contained page."""
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title>",
        f"<style>{STYLE}</style><h1>{html.escape(title)}</h1>",
        *(_article(episode) for episode in episodes),
        "</html>",
    ]
    path.write_text("\n".join(parts), encoding="utf-8")


def _article(episode: PlayedEpisode) -> str:
    recorded = episode.recorded
    outcome = {True: "<b class=good>success</b>", False: "<b class=bad>no success</b>", None: ""}[recorded.success]
    heading = f"{html.escape(recorded.title)}: {html.escape(recorded.tag)}, seed {recorded.seed}"
    turns: list[str] = []
    for i, observation in enumerate(episode.observations):
        frame = f"<img alt='' src='{_data_url(episode.frames[i])}'>" if episode.frames else ""
        answer = recorded.answers[i].strip() if i < len(recorded.answers) else "end"
        text = "" if frame else f"<pre>{html.escape(observation)}</pre>"
        turns.append(f"<figure>{frame}{text}<figcaption>&#8594; {html.escape(answer)}</figcaption></figure>")
    return (
        f"<article><h2>{heading}</h2><p>reward {recorded.reward:g} {outcome}</p>"
        f"<div class=turns>{''.join(turns)}</div></article>"
    )


def _data_url(frame: Frame) -> str:
    buffer = io.BytesIO()
    Image.fromarray(frame).quantize(32).save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
