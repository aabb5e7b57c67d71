"""What a run of version 0.1 left in Redis is read by this build; tests/integration/test_old_run.py resumes it."""

import tarfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from redis import Redis

from offbeat.deploy.config.loader import read_run
from offbeat.services.buffer.config import RedisConfig
from offbeat.services.buffer.group_ledger import read_events_after
from offbeat.services.control.run import RunRecord, RunState
from offbeat.services.keys import RunKeys
from offbeat.services.messages.codec import decode_manifest, decode_trajectory
from offbeat.services.messages.types import SCHEMA_VERSION
from offbeat.services.redis.server import EmbeddedRedis
from tests.paths import ROOT

ARCHIVE = ROOT / "tests" / "integration" / "data" / "run-0.1.tar.xz"
RUN = "before_offbeat"
KEYS = RunKeys(RUN)


@pytest.fixture(scope="module")
def old_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Redis]]:
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    with EmbeddedRedis(folder / "redis", RedisConfig()) as server, Redis.from_url(server.url) as redis:
        yield folder, redis


def test_trajectories_of_version_0_1_are_read(old_run: tuple[Path, Redis]):
    """Four groups were complete and untrained when the run was stopped; their messages carry the schema version."""
    _, redis = old_run
    blobs = [blob for key in redis.scan_iter(f"{KEYS.prefix}buffer:blobs:*") for blob in redis.hvals(key)]  # type: ignore[union-attr]
    assert {tuple(msgspec.msgpack.decode(blob)[:2]) for blob in blobs} == {("trajectory", SCHEMA_VERSION)}
    trajectories = [decode_trajectory(blob) for blob in blobs]
    members = sorted((trajectory.group_id, trajectory.index) for trajectory in trajectories)
    assert members == sorted((f"{RUN}-{number}", index) for number in range(8, 12) for index in range(8))
    assert all(trajectory.segments for trajectory in trajectories)


def test_weights_record_and_events_of_version_0_1_are_read(old_run: tuple[Path, Redis]):
    folder, redis = old_run
    manifests = [decode_manifest(blob) for blob in redis.hvals(KEYS.manifests)]  # type: ignore[union-attr]
    assert sorted(manifest.version for manifest in manifests) == [3, 4]
    record = RunRecord.decode(redis.hgetall(KEYS.record))  # type: ignore[arg-type]
    assert (record.run_id, record.state, record.max_steps, record.uid) == (RUN, RunState.STOPPED, 6, "")
    assert record.settings.num_workers == 1
    assert read_run(folder / "config.yaml").exp_name == RUN
    events = read_events_after(redis, RUN, "0")
    assert [event.ordinal for event in events] == list(range(1, 33))
