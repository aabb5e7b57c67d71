"""A recorded episode is played again by its real env, in a process of its own."""

import base64
import io
from pathlib import Path

import pytest
from PIL import Image

from offbeat.deploy.config.loader import load_run
from offbeat.deploy.console.archive import FolderArchive
from offbeat.deploy.console.frames import EpisodeToReplay, render_frames
from offbeat.envs import registry
from offbeat.services.control.console.archive import NotRecordedError
from offbeat.services.rollout.config import CustomEnv
from offbeat.services.rollout.envs.runners import render_png
from offbeat.services.rollout.episodes.state_hash import hash_state
from tests.copying import replace
from tests.deploy.console.folders import play, write_run
from tests.fakes import make_trajectory
from tests.paths import QUICKSTART

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def episode() -> EpisodeToReplay:
    played = play(make_trajectory(group=3))
    env = load_run(QUICKSTART).custom_envs["FrozenLake"]
    return EpisodeToReplay(env, played.seed, played.text[2::2], [turn.state_hash for turn in played.turns])


def test_a_frame_is_drawn_for_each_observation(episode: EpisodeToReplay) -> None:
    frames = [Image.open(io.BytesIO(base64.b64decode(each))) for each in render_frames(episode).frames]
    assert len(frames) == 3
    assert frames[0].size == frames[2].size
    assert frames[0].tobytes() != frames[2].tobytes()


def test_an_env_that_plays_otherwise_is_reported_with_the_turn(episode: EpisodeToReplay) -> None:
    with pytest.raises(NotRecordedError, match="observation of turn 0 is another one"):
        render_frames(replace(episode, seed=episode.seed + 1))
    with pytest.raises(NotRecordedError, match="observation of turn 1 is another one"):
        render_frames(replace(episode, answers=("left", "down")))


def test_an_episode_of_images_is_compared_by_its_images(episode: EpisodeToReplay) -> None:
    settings = {**episode.env.env_config, "render_mode": "rgb_array"}
    env = episode.env.model_copy(update={"agent_template": "{image}", "env_config": settings})
    lake = registry.make(env.env_type, settings)
    observation, _ = lake.reset(seed=episode.seed)
    digests: list[str] = []
    for answer in episode.answers:
        digests.append(hash_state(str(observation), render_png(lake)))
        observation, *_ = lake.step(answer)
    lake.close()
    assert len(render_frames(replace(episode, env=env, digests=digests)).frames) == 3
    with pytest.raises(NotRecordedError, match="observation of turn 0 is another one"):
        render_frames(replace(episode, env=env))


def test_what_can_not_be_drawn_is_reported(episode: EpisodeToReplay) -> None:
    with pytest.raises(NotRecordedError, match="it has no digests"):
        render_frames(replace(episode, digests=["", ""]))
    missing = CustomEnv(env_type="no_such_module:Env")
    with pytest.raises(NotRecordedError, match=r"can't be played again: render_error: .*no_such_module"):
        render_frames(replace(episode, env=missing))


def test_the_frames_of_a_run_come_from_its_folder(tmp_path: Path) -> None:
    archive = FolderArchive(write_run(tmp_path / "pond", "pond", played=True))
    assert len(archive.frames(6, 1).frames) == 3
    with pytest.raises(NotRecordedError, match="group 9 is not trained"):
        archive.frames(9, 0)
