"""Backups of a run, also while it plays and trains, and what a restored one is."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from redis import Redis
from typer.testing import CliRunner, Result

from offbeat.deploy.backup.backup import back_up, open_redis
from offbeat.deploy.backup.errors import BackupError
from offbeat.deploy.backup.restore import restore
from offbeat.deploy.cli.app import app
from offbeat.deploy.cli.audit import examine
from offbeat.deploy.config.loader import dump_yaml, read_run
from offbeat.deploy.run_folder import claim_id, read_claim, write_config
from offbeat.services.buffer.admin import snapshot_from
from offbeat.services.buffer.config import RedisConfig
from offbeat.services.buffer.scripts import BufferScripts
from offbeat.services.buffer.worker_client import AsyncRolloutBuffer
from offbeat.services.keys import RUNS, RunKeys
from offbeat.services.redis.connection import connect, connect_async
from offbeat.services.redis.server import EmbeddedRedis
from offbeat.trainer.learner.step_ledger import read_step_ledger
from tests.deploy.backup.busy_run import GROUPS_PER_STEP, RUN, BusyLearner, busy_config, busy_run, keep_busy, play
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
KEYS = RunKeys(RUN)
NUM_BACKUPS = 6


def offbeat(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def values(redis: Redis) -> dict[bytes, object]:
    """Every key of the run that no process keeps alive, with its value."""
    keys = [key for key in redis.scan_iter(f"{KEYS.prefix}*") if redis.ttl(key) == -1]
    return {key: READERS[redis.type(key)](redis, key) for key in keys}  # type: ignore[index]


def read_stream(redis: Redis, key: bytes) -> object:
    groups = [group["name"] for group in redis.xinfo_groups(key)]  # type: ignore[union-attr]
    fields = ("message_id", "consumer", "times_delivered")
    pending = [
        [each[name] for name in fields]
        for group in groups
        for each in redis.xpending_range(key, group, "-", "+", 1000)  # type: ignore[union-attr]
    ]
    return redis.xinfo_stream(key)["last-generated-id"], groups, pending, redis.xrange(key)  # type: ignore[index]


READERS: dict[bytes, Callable[[Redis, bytes], object]] = {
    b"string": lambda redis, key: redis.get(key),
    b"hash": lambda redis, key: redis.hgetall(key),
    b"list": lambda redis, key: redis.lrange(key, 0, -1),
    b"zset": lambda redis, key: redis.zrange(key, 0, -1, withscores=True),
    b"stream": read_stream,
}


async def run_and_back_up(folder: Path, target: Path) -> None:
    """Back a run up after five steps: the last unsaved, a group complete, one being played."""
    async with busy_run(folder) as (server, _, worker, uid):
        learner = BusyLearner(server.url, folder, uid)
        while learner.step < 5:
            await play(worker, 3)
            await asyncio.to_thread(learner.train)
        while learner.buffer.snapshot().ready < 1:
            await play(worker, 1)
        assert await worker.claim("w", 1)
        done = await asyncio.to_thread(offbeat, "backup", folder, "-o", target)
        learner.close()
        assert "newest checkpoint: step 4" in done.output, done.output


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder `run` and its backup `run.tar`, for tests that change neither."""
    folder = tmp_path_factory.mktemp("originals")
    asyncio.run(run_and_back_up(folder / "run", folder / "run.tar"))
    return folder


async def test_backups_of_a_running_run_are_each_whole_and_proven(tmp_path: Path):
    """Its learner removes checkpoints, its ledgers and its Redis grow all the time; each backup is one moment of it."""
    folder = tmp_path / "run"
    async with busy_run(folder) as (server, _, worker, uid):
        stop = asyncio.Event()
        learner = BusyLearner(server.url, folder, uid)
        playing = asyncio.create_task(keep_busy(worker, learner, stop))
        for n in range(NUM_BACKUPS):
            await wait_until(lambda n=n: learner.step > 3 * n)
            done = await asyncio.to_thread(back_up, folder, busy_config(folder), tmp_path / f"{n}.tar")
            assert done.num_keys > 5
        stop.set()
        await playing
        learner.close()
    steps = []
    for n in range(NUM_BACKUPS):
        restored = restore(tmp_path / f"{n}.tar", tmp_path / f"restored-{n}")
        result, evidence = examine(restored.folder)
        assert result.proven, result.findings
        assert not result.notes, result.notes
        assert evidence.counters is not None
        assert evidence.counters.admitted == len(result.groups)
        steps.append(result.lineage.last)
    assert steps == sorted(steps)
    assert steps[-1] > steps[0]


async def test_a_restored_run_trains_the_groups_that_it_held(originals: Path, tmp_path: Path):
    """Its next learner repeats the unsaved step on the same groups, continues, and the audit proves all of it."""
    journal, _ = read_step_ledger(originals / "run")
    unsaved = [group.number for group in journal[-1].groups]  # type: ignore[union-attr]
    folder = restore(originals / "run.tar", tmp_path / "elsewhere").folder
    assert [mode(path) for path in (originals / "run.tar", folder, folder / "config.yaml")] == [0o600, 0o700, 0o600]
    with EmbeddedRedis(folder / "redis", RedisConfig()) as server, connect(server.url) as redis:
        uid = redis.hget(KEYS.record, "uid").decode()  # type: ignore[union-attr]
        learner = BusyLearner(server.url, folder, uid)
        assert learner.step == 4
        assert learner.begun.incarnation == 2
        async_redis = connect_async(server.url, run_id=RUN)
        worker = AsyncRolloutBuffer(async_redis, RUN, uid)
        assert learner.train() == unsaved
        while learner.step < 10:
            await play(worker, 3)
            learner.train()
        learner.close()
        await async_redis.aclose()
    result, _ = examine(folder)
    assert result.proven, result.findings
    assert result.lineage.last == 10


def test_a_restored_redis_has_every_value_and_a_later_epoch(originals: Path, tmp_path: Path, redis_url: str):
    """In a Redis of a mesh: nothing of the run is started unasked, and learners of before stay fenced."""
    folder = tmp_path / "run"
    with open_redis(originals / "run", busy_config(originals / "run")) as redis:
        before, epoch = values(redis), int(redis.get(KEYS.epoch))  # type: ignore[arg-type]
    with connect(redis_url) as redis:
        redis.set(KEYS.epoch, epoch + 7, ex=1000)  # of a run of this name that was deleted here
        done = offbeat("restore", originals / "run.tar", "--to", folder, "--redis", redis_url)
        assert done.exit_code == 0, done.output
        assert f"runs start {folder}/config.yaml output_dir={folder} resume_from_checkpoint=true" in done.output
        after = values(redis)
        different = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
        assert different == {KEYS.record.encode(), KEYS.epoch.encode()}
        assert int(redis.get(KEYS.epoch)) == epoch + 8  # type: ignore[arg-type]
        assert redis.ttl(KEYS.epoch) == -1
        assert not redis.exists(KEYS.lease)
        assert redis.hmget(KEYS.record, "state", "wanted", "output_dir") == [
            b"stopped",
            b"stopped",
            str(folder).encode(),
        ]
        assert redis.zrange(RUNS, 0, -1) == [RUN.encode()]
        assert snapshot_from(BufferScripts(redis, RUN)("snapshot")).counters.trained == 4 * GROUPS_PER_STEP
        claim = claim_id(RUN, float(redis.hget(KEYS.record, "created_at")))  # type: ignore[arg-type]
        assert (redis.hget(KEYS.record, "mesh"), read_claim(folder)) == (b"", claim), (
            "which its control service looks for"
        )
    assert not (folder / "redis").exists()
    assert json.loads(offbeat("audit", folder, "--redis", redis_url, "--json").output)["proven"]


def test_a_restored_run_leaves_its_external_redis(originals: Path, tmp_path: Path, redis_url: str):
    """Which may be lost, or still have the original run."""
    folder = restore(originals / "run.tar", tmp_path / "run").folder
    config = busy_config(folder)
    write_config(folder, dump_yaml(config.model_copy(update={"redis": RedisConfig(url="redis://127.0.0.1:1/0")})))
    back_up(folder, config, tmp_path / "run.tar")
    restored = restore(tmp_path / "run.tar", tmp_path / "again").folder
    assert read_run(restored / "config.yaml") == config.model_copy(update={"output_dir": restored})
    assert mode(restored / "config.yaml") == 0o600
    assert examine(restored)[1].counters is not None
    restored = restore(tmp_path / "run.tar", tmp_path / "elsewhere", redis_url).folder
    assert read_run(restored / "config.yaml") == config.model_copy(update={"output_dir": restored})


def test_what_is_there_is_never_overwritten(originals: Path, tmp_path: Path, redis_url: str):
    folder, file, other = originals / "run", originals / "run.tar", tmp_path / "other"
    assert f"{folder} exists: name a new folder" in offbeat("restore", file).output
    assert "run.tar exists" in offbeat("backup", folder, "-o", file).output
    with connect(redis_url) as redis:
        redis.hset(KEYS.record, "state", "running")
        refused = offbeat("restore", file, "--to", other, "--redis", redis_url)
        assert (refused.exit_code, "this Redis has run 'busy' (1 keys)" in refused.output) == (2, True)
        assert redis.hgetall(KEYS.record) == {b"state": b"running"}
    assert "is inside" in offbeat("restore", file, "--to", folder / "inner").output
    assert not other.exists()


def test_a_cut_or_damaged_file_restores_nothing(originals: Path, tmp_path: Path):
    content = (originals / "run.tar").read_bytes()
    at = content.index(b"weights" * 100)
    for name, damaged, says in [
        ("cut", content[: len(content) // 2], "is not a whole backup"),
        ("flipped", content[:at] + b"W" + content[at + 1 :], "differs from its checksum"),
        ("text", b"no archive", "is not a whole backup"),
        ("gone", None, "there is no file"),
    ]:
        file = tmp_path / f"{name}.tar"
        if damaged is not None:
            file.write_bytes(damaged)
        refused = offbeat("restore", file, "--to", tmp_path / "new")
        assert (refused.exit_code, says in refused.output) == (2, True), refused.output
        assert sorted(path.name for path in tmp_path.iterdir() if "new" in path.name) == []


def test_a_journal_ahead_of_its_redis_is_refused(originals: Path, tmp_path: Path):
    """Redis has lost what the journal knows: resuming reconciles both."""
    folder = restore(originals / "run.tar", tmp_path / "new").folder
    with (folder / "ledger" / "steps.jsonl").open("a") as file:
        file.write(json.dumps({"step": 6, "epoch": 1, "groups": [[4000, 5, 1]]}) + "\n")
    with pytest.raises(BackupError, match="has group 4000, but its Redis has given out only"):
        back_up(folder, busy_config(folder), tmp_path / "again.tar")
    assert not list(tmp_path.glob("*again*"))
