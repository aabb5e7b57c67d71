"""Episodes without a mesh, by a run's rules."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from offbeat.deploy.config.loader import load_run
from offbeat.deploy.play.rollouts import EpisodeRequest, run_episodes
from offbeat.deploy.run_setup import write_policy
from offbeat.services.chat.append_only import load_chat_format
from offbeat.services.messages.types import Completion, EpisodeKind, VersionSpan
from tests.paths import QUICKSTART
from tests.services.rollout.worker_bench import custom

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("locked", "most"), [(True, 1), (False, 2)])
async def test_envs_that_are_not_thread_safe_are_stepped_one_at_a_time(locked: bool, most: int, tmp_path: Path):
    crowd = custom("Crowd", "thread", max_steps=1, use_thread_lock=locked)
    config = load_run(QUICKSTART, [f"output_dir={tmp_path}"]).model_copy(update={"custom_envs": {"FrozenLake": crowd}})
    write_policy(config, tmp_path / "policy")
    chat = load_chat_format(tmp_path / "policy")

    async def sample(_: Sequence[int], __: int) -> Completion:
        return Completion("r", (chat.end_id,), (-0.5,), (VersionSpan(0, 1, 0),))

    request = EpisodeRequest(2, 1, EpisodeKind.TRAIN, seed=1, concurrency=2)
    result = await run_episodes(config, request, chat, sample, lambda _, __: None)
    assert not result.failures
    assert max(trajectory.metrics["inside"] for trajectory in result.trajectories) == most
