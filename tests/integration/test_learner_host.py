"""The learner's host as the reconciler starts it, on a real Ray."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from redis import Redis

from offbeat.deploy.components import ray_names
from offbeat.deploy.components.learner import ManagedLearner
from offbeat.deploy.components.learner_host import LEARNER_LOG, learner_key, read_status
from offbeat.deploy.config.loader import load_run
from offbeat.services.keys import RunKeys
from tests.paths import QUICKSTART
from tests.processes import has_ended
from tests.waiting import wait_until_sync

pytestmark = pytest.mark.timeout(300)

RUN = "quickstart"


@pytest.fixture
def ray_node() -> Iterator[None]:
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, namespace=ray_names.NAMESPACE)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("ray_node")
async def test_a_host_of_an_earlier_run_is_replaced(redis_url: str, tmp_path: Path):
    """Its actor still exists when a run of the same name is started, in another folder."""
    with Redis.from_url(redis_url) as redis:
        redis.hset(RunKeys(RUN).record, "uid", "old")
        old = ManagedLearner(load_run(QUICKSTART, [f"output_dir={tmp_path / 'old'}"]), redis, redis_url, "old")
        await old.ensure()
        wait_until_sync(lambda: redis.hexists(learner_key(RUN), "pid"))
        learner = psutil.Process(int(redis.hget(learner_key(RUN), "pid") or 0))
        redis.delete(*redis.keys("*"))
        redis.hset(RunKeys(RUN).record, "uid", "new")
        new = ManagedLearner(load_run(QUICKSTART, [f"output_dir={tmp_path / 'new'}"]), redis, redis_url, "new")
        await new.ensure()
        assert read_status(redis, RUN).started
        wait_until_sync((tmp_path / "new" / LEARNER_LOG).exists)
        wait_until_sync(lambda: has_ended(learner.pid))
        await new.stop(now=True)
        await new.forget()
