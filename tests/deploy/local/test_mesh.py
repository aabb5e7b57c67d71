import asyncio
import errno
import json
import os
import time
from pathlib import Path

import pytest
from redis import Redis

from offbeat.deploy.components.learner_host import alive_key, learner_key
from offbeat.deploy.config.loader import canonical_tree, compose_tree, load_run, read_run, validate_tree
from offbeat.deploy.local.mesh import SPARE_CPUS, LocalMesh
from offbeat.deploy.run_folder import ENDPOINTS, Endpoints, write_endpoints
from offbeat.deploy.run_setup import run_spec
from offbeat.services.control.run import RunExistsError, RunState
from offbeat.services.control.store import RunStore
from offbeat.services.keys import RunKeys
from offbeat.services.redis.connection import connect_async
from tests.paths import QUICKSTART
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("folder", ["theirs", "ours"])
async def test_a_run_of_another_mesh_is_left_as_it_is(redis_url: str, tmp_path: Path, folder: str):
    """A second start by the same name, on the same Redis, is refused; its end marks and stops nothing.

    Also by the same configuration, on another host.
    """
    theirs = load_run(QUICKSTART, [f"redis.url={redis_url}", f"output_dir={tmp_path}/theirs"])
    keys = RunKeys(theirs.exp_name)
    async with connect_async(redis_url) as async_redis:
        await RunStore(async_redis).create(run_spec(theirs))
        with Redis.from_url(redis_url) as redis:
            before = redis.hgetall(keys.record)
            ours = theirs.model_copy(update={"output_dir": tmp_path / folder})
            mesh = LocalMesh(ours, started_at=time.time())
            await mesh._start_redis()
            with pytest.raises(RunExistsError, match="stop it first"):
                await mesh._record_run()
            assert await mesh.stop_learner() == -1
            mesh._write_outcome(RunState.FAILED)  # by `stop`, which would end this process's children
            assert redis.hgetall(keys.record) == before


async def test_a_run_whose_control_service_starts_slowly_stays_active(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """And its end writes nothing after it was deleted."""
    monkeypatch.setattr("offbeat.deploy.local.mesh.HEARTBEAT_INTERVAL_S", 0.01)
    config = load_run(QUICKSTART, [f"redis.url={redis_url}", f"output_dir={tmp_path}"])
    record = RunKeys(config.exp_name).record
    mesh = LocalMesh(config, started_at=time.time())
    await mesh._start_redis()
    await mesh._record_run()
    with Redis.from_url(redis_url, decode_responses=True) as redis:
        redis.hset(record, "beat", "0")
        beating = asyncio.create_task(mesh._send_heartbeats())
        await wait_until(lambda: float(str(redis.hget(record, "beat"))) > time.time() - 5)
        beating.cancel()
        mesh._write_outcome(RunState.STOPPED)
        assert redis.hget(record, "state") == "stopped"
        redis.delete(record)
        mesh._write_outcome(RunState.STOPPED)
        assert not redis.exists(record)


async def test_a_run_that_another_command_has_resumed_is_left_to_it(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """It keeps its uid."""
    monkeypatch.setattr("offbeat.deploy.local.mesh.HEARTBEAT_INTERVAL_S", 0.01)
    config = load_run(QUICKSTART, [f"redis.url={redis_url}", f"output_dir={tmp_path}"])
    config = config.model_copy(update={"resume_from_checkpoint": True})
    record = RunKeys(config.exp_name).record
    suspended, successor = (LocalMesh(config, started_at=time.time()) for _ in range(2))
    for mesh in (suspended, successor):
        await mesh._start_redis()
    await suspended._record_run()
    with Redis.from_url(redis_url, decode_responses=True) as redis:
        redis.hset(record, "beat", "0")
        await successor._record_run()
        before = redis.hgetall(record)
        await asyncio.wait_for(suspended._send_heartbeats(), PATIENCE_S)
        suspended._write_outcome(RunState.FAILED)
        assert await suspended.stop_learner() == -1
        assert redis.hgetall(record) == before
        assert caplog.text.count("is another command's by now") == 1
        successor._write_outcome(RunState.STOPPED)
        assert redis.hget(record, "state") == "stopped"


@pytest.mark.parametrize("stage", ["train", "checkpoint", "settle"])
async def test_a_learner_that_writes_its_checkpoint_is_waited_for(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
):
    """However long it takes; one that does something else ends with the grace."""
    monkeypatch.setattr("offbeat.deploy.local.mesh.LEARNER_GRACE_S", 0.3)
    config = load_run(QUICKSTART, [f"redis.url={redis_url}", f"output_dir={tmp_path}", "track_with=[]"])
    run_id = config.exp_name
    async with connect_async(redis_url) as async_redis:
        await RunStore(async_redis).create(run_spec(config))
    with Redis.from_url(redis_url) as redis:
        redis.hset(learner_key(run_id), mapping={"incarnation": "1"})
        redis.set(alive_key(run_id), "1")
        redis.hset(RunKeys(run_id).record, "learner_doing", json.dumps({"stage": stage, "step": 3, "since": 0.0}))
        mesh = LocalMesh(config, started_at=time.time())
        mesh._redis, mesh._redis_url, mesh.owns_run = redis, redis_url, True
        stopping = asyncio.create_task(mesh.stop_learner())
        _, waiting = await asyncio.wait({stopping}, timeout=PATIENCE_S if stage == "train" else 1.5)
        assert bool(waiting) is (stage != "train")
        redis.delete(alive_key(run_id))
        async with asyncio.timeout(PATIENCE_S):
            assert await stopping == -1


def test_the_ray_folder_of_a_process_in_another_container_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A shared /tmp: its pid says nothing here."""
    monkeypatch.setattr("offbeat.deploy.local.mesh.TEMP_ROOT", tmp_path)
    monkeypatch.setattr("offbeat.deploy.local.mesh.psutil.pid_exists", lambda _pid: False)
    theirs = LocalMesh(load_run(QUICKSTART, [f"output_dir={tmp_path}/theirs"]), started_at=time.time())
    theirs._make_ray(1)
    orphan = tmp_path / "offbeat-77-killed"
    orphan.mkdir()
    ours = LocalMesh(load_run(QUICKSTART, [f"output_dir={tmp_path}/ours"]), started_at=time.time())
    ours._make_ray(2)
    assert theirs._ray_temp is not None
    assert theirs._ray_temp.is_dir()
    assert not orphan.exists()
    for mesh in (ours, theirs):
        mesh._remove_leftovers()
    assert list(tmp_path.glob("offbeat-*")) == []


def test_a_store_of_weights_that_fails_leaves_the_rest_to_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """And a run that has ended writes its report."""
    monkeypatch.setattr("offbeat.deploy.local.mesh.TEMP_ROOT", tmp_path)
    run = tmp_path / "run"
    config = read_run(QUICKSTART, [f"output_dir={run}", "weights.transport=fs", "weights.url=nowhere://bucket/x"])
    mesh = LocalMesh(config, started_at=time.time())
    mesh._make_ray(1)
    write_endpoints(run, Endpoints(os.getpid(), "redis://:secret@x", "http://y"))
    mesh._remove_leftovers()
    assert not (run / ENDPOINTS).exists()
    assert list(tmp_path.glob("offbeat-*")) == []
    assert "weights.url 'nowhere://bucket/x' cannot be used" in caplog.text


def test_ray_has_the_cpus_that_all_parts_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Replicas of rewards, too, which would never be scheduled."""
    monkeypatch.setattr("offbeat.deploy.local.mesh.TEMP_ROOT", tmp_path)
    monkeypatch.setattr("offbeat.deploy.local.mesh.os.cpu_count", lambda: 1)
    overrides = [f"output_dir={tmp_path}/run", "rollout.num_workers=1", "rollout.cpus_per_worker=0.25"]
    config = validate_tree(canonical_tree(compose_tree(Path("rlvr"), overrides)))
    (reward, *_) = config.rewards
    config = config.model_copy(update={"rewards": (reward.model_copy(update={"num_replicas": 40}),)})
    mesh = LocalMesh(config, started_at=time.time())
    ray = mesh._make_ray(1)
    infer = config.actor_infer
    claimed = 40 * reward.cpus_per_replica + infer.num_replicas * infer.cpus_per_replica + 0.25
    assert ray._settings.num_cpus >= claimed + SPARE_CPUS
    mesh._remove_leftovers()


def test_ray_logs_that_can_not_be_copied_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """A full disk does not take the run's end."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("offbeat.deploy.local.mesh.TEMP_ROOT", tmp_path)
    mesh = LocalMesh(load_run(QUICKSTART, [f"output_dir={tmp_path}/run"]), started_at=time.time())
    mesh._make_ray(1)
    (tmp_path / "run" / "logs" / "ray").resolve().mkdir(parents=True)
    monkeypatch.setattr("offbeat.deploy.local.mesh.shutil.copytree", fail)
    mesh._copy_ray_logs()
    assert "not all of Ray's logs could be copied" in caplog.text
    mesh._remove_leftovers()
