import time
from pathlib import Path

import pytest
from redis import Redis

from offbeat.deploy.config.loader import load_run
from offbeat.deploy.local.mesh import LocalMesh
from offbeat.deploy.run_setup import run_spec
from offbeat.services.control.run import RunExistsError, RunState
from offbeat.services.control.store import RunStore
from offbeat.services.keys import RunKeys
from offbeat.services.redis.connection import connect_async
from tests.paths import QUICKSTART

pytestmark = pytest.mark.slow


async def test_a_run_of_another_mesh_is_left_as_it_is(redis_url: str, tmp_path: Path):
    """A second start by the same name, on the same Redis, is refused; its end marks and stops nothing."""
    theirs = load_run(QUICKSTART, [f"redis.url={redis_url}", f"output_dir={tmp_path}/theirs"])
    keys = RunKeys(theirs.exp_name)
    async with connect_async(redis_url) as async_redis:
        await RunStore(async_redis).create(run_spec(theirs))
        with Redis.from_url(redis_url) as redis:
            before = redis.hgetall(keys.record)
            ours = theirs.model_copy(update={"output_dir": tmp_path / "ours"})
            mesh = LocalMesh(ours, started_at=time.time())
            await mesh._start_redis()
            with pytest.raises(RunExistsError, match="stop it first"):
                await mesh._start_learner_early()
            assert await mesh.stop_learner() == -1
            mesh._write_outcome(RunState.FAILED)  # by `stop`, which would end this process's children
            assert redis.hgetall(keys.record) == before
