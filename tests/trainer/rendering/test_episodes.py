from pathlib import Path

import gymnasium
import numpy as np
import pytest
from PIL import Image

from offbeat.deploy.config.loader import load_run
from offbeat.deploy.config.run import RunConfig
from offbeat.trainer.rendering.episodes import (
    PlayedEpisode,
    RecordedEpisode,
    play_again,
    render_frame,
    write_gif,
    write_html,
)
from tests.paths import QUICKSTART


class Counting(gymnasium.Env[str, str]):
    """A text env without images."""

    def reset(self, *, seed: int | None = None, options: dict[str, object] | None = None):  # noqa: ARG002
        return f"<seed {seed}>", {}

    def step(self, action: str):
        return f"you said {action}", 0.0, action == "stop", False, {}


@pytest.fixture
def config() -> RunConfig:
    return load_run(QUICKSTART)


def test_an_episode_is_played_again_as_it_was_recorded(config: RunConfig):
    recorded = RecordedEpisode("after training", "FrozenLake", 2**31 + 5, ("Down", "Right", "nonsense"), 0.0, False)
    first, again = play_again(config, recorded), play_again(config, recorded)
    assert first.observations == again.observations
    assert len(first.frames) == len(first.observations)
    assert first.frames[0].dtype == "uint8"


def test_images_become_an_animation_and_a_page(config: RunConfig, tmp_path: Path):
    episodes = [
        play_again(config, RecordedEpisode(f"<{i}>", "FrozenLake", 2**31 + i, ("Down",) * (i + 1), 0.0, bool(i % 2)))
        for i in range(5)
    ]
    assert write_gif(tmp_path / "e.gif", episodes)
    with Image.open(tmp_path / "e.gif") as image:
        assert image.n_frames >= max(len(episode.frames) for episode in episodes)
        assert (tmp_path / "e.gif").stat().st_size < 500_000
    write_html(tmp_path / "e.html", episodes, title="Episodes")
    page = (tmp_path / "e.html").read_text()
    assert page.count("<article>") == 5
    assert "&lt;0&gt;" in page
    assert "<0>" not in page


def test_an_env_without_images_is_shown_by_its_texts(tmp_path: Path):
    config = RunConfig.model_validate_json(
        f'{{"custom_envs": {{"Count": {{"env_type": "{__name__}:Counting"}}}}}}'.replace(__name__, "text_envs")
    )
    import sys

    sys.modules["text_envs"] = sys.modules[__name__]
    try:
        episode = play_again(config, RecordedEpisode("now", "Count", 7, ("go", "stop", "more"), 0.0, None))
    finally:
        del sys.modules["text_envs"]
    assert episode.observations == ("<seed 7>", "you said go", "you said stop")
    assert not write_gif(tmp_path / "e.gif", [episode])
    write_html(tmp_path / "e.html", [episode], title="Texts")
    assert "&lt;seed 7&gt;" in (tmp_path / "e.html").read_text()


class Pictures(Counting):
    """Frames of a shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape

    def render(self):
        return np.full(self._shape, 128, dtype=np.uint8)


@pytest.mark.parametrize("shape", [(8, 6), (8, 6, 1), (8, 6, 3), (8, 6, 4)])
def test_frames_of_every_kind_become_rgb(shape: tuple[int, ...]):
    frame = render_frame(Pictures(shape))
    assert frame is not None
    assert frame.shape == (8, 6, 3)
    assert (frame[:, :, 0] == 128).all()


def test_frames_of_an_episode_are_at_most_512_pixels_wide(config: RunConfig, monkeypatch: pytest.MonkeyPatch):
    drawn = np.full((720, 1280, 3), 128, dtype=np.uint8)
    monkeypatch.setattr("offbeat.trainer.rendering.episodes.render_frame", lambda _: drawn)
    episode = play_again(config, RecordedEpisode("t", "FrozenLake", 7, ("Down",), 0.0, None))
    assert {frame.shape for frame in episode.frames} == {(288, 512, 3)}


@pytest.mark.parametrize("shape", [(8,), (8, 6, 2), (2, 8, 6, 3)])
def test_arrays_that_are_no_pictures_are_left_out(shape: tuple[int, ...]):
    assert render_frame(Pictures(shape)) is None


def test_an_animation_has_frames_of_several_sizes(tmp_path: Path):
    episodes = [
        PlayedEpisode(
            RecordedEpisode(title, "Count", 1, ("a",), 0.0, False),
            ("", ""),
            (np.zeros((height, width, 3), dtype=np.uint8),) * 2,
        )
        for title, height, width in (("before", 8, 60), ("after", 9, 200))
    ]
    assert write_gif(tmp_path / "all.gif", episodes)
    with Image.open(tmp_path / "all.gif") as gif:
        assert gif.size[0] >= 200
