"""From the learner to a subscriber over a real Redis: order, fencing, replays, lost bytes."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import redis
import torch
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from s3fs import S3FileSystem
from safetensors.torch import load_file

from offbeat.services.errors import FencedError, RetryableError, StoreUnavailableError, WeightsError
from offbeat.services.keys import RunKeys
from offbeat.services.messages.types import Manifest
from offbeat.services.redis.connection import SOCKET_TIMEOUT_S
from offbeat.services.weights.config import WeightsConfig
from offbeat.services.weights.publisher import RedisWeightPublisher
from offbeat.services.weights.subscriber import RedisWeightSubscriber
from offbeat.services.weights.transports.factory import cleanup
from offbeat.services.weights.transports.filesystem import FilesystemTransport
from tests.services.weights.publishing import give_lease
from tests.trainer.training.object_store import BUCKET, s3_bucket, s3_environment, s3_server
from tests.waiting import wait_until

RUN = "publishing"
KEYS = RunKeys(RUN)


@pytest.fixture
def config(tmp_path: Path) -> WeightsConfig:
    return WeightsConfig(transport="fs", url=str(tmp_path / "weights"))


@pytest.fixture
def server(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


class Learner:
    """A learner's publisher over one parameter, whose value is the version."""

    def __init__(self, server: redis.Redis, config: WeightsConfig, epoch: int = 1, **options: Any) -> None:
        self.parameter = torch.zeros(4)
        give_lease(server, RUN, epoch)
        self.publisher = RedisWeightPublisher(server, RUN, config, epoch, Path("unused"), **options)

    def publish(self, version: int, value: float | None = None) -> None:
        self.parameter.fill_(version if value is None else value)
        self.publisher.publish(version, version, [("w", self.parameter)])
        self.parameter.fill_(-1)

    def __enter__(self) -> "Learner":
        return self

    def __exit__(self, *_: object) -> None:
        self.publisher.close()


@pytest.mark.parametrize("transport", ["shm", "fs"])
def test_versions_of_a_folder_that_was_copied_are_replaced(
    server: redis.Redis, tmp_path: Path, transport: Literal["shm", "fs"]
) -> None:
    """Redis was copied with the folder, from a moment before the checkpoint: it names files of the original."""
    config = WeightsConfig(transport=transport, keep_versions=2)
    give_lease(server, RUN, 1)
    original = RedisWeightPublisher(server, RUN, config, 1, tmp_path / "original")
    for version in (0, 1):
        original.publish(version, version, [("w", torch.zeros(4))])
    original.close()
    give_lease(server, RUN, 2)
    copy = RedisWeightPublisher(server, RUN, config, 2, tmp_path / "copy")
    for version in (2, 3, 4):
        copy.publish(version, version, [("w", torch.ones(4))])
    copy.close()
    newest = copy.newest()
    assert newest is not None
    assert newest.version == 4
    left = original.newest()
    assert left is None, "Redis no longer names it"
    assert cleanup(RUN, config, tmp_path / "original") == 2, "they are not the copy's to delete"
    assert cleanup(RUN, config, tmp_path / "copy") == 2


def files(config: WeightsConfig) -> list[Path]:
    return sorted(Path(str(config.url)).iterdir())


def progress(server: redis.Redis) -> dict[bytes, bytes]:
    return server.hgetall(KEYS.progress)  # type: ignore[return-value]


async def read(redis_url: str, config: WeightsConfig) -> tuple[int, float] | None:
    async with AsyncRedis.from_url(redis_url) as client:
        subscriber = RedisWeightSubscriber(client, RUN, config, Path("unused"))
        manifest = await subscriber.newest()
        if manifest is None:
            return None
        async with subscriber.fetch(manifest) as path:
            return manifest.version, load_file(path)["w"][0].item()


async def test_a_subscriber_reads_the_published_tensors_not_later_changes(
    server: redis.Redis, redis_url: str, config: WeightsConfig
) -> None:
    assert await read(redis_url, config) is None
    with Learner(server, config) as learner:
        learner.publish(0)
        learner.publish(1)
    assert await read(redis_url, config) == (1, 1.0)
    assert progress(server) == {b"version": b"1", b"step": b"1"}


async def test_a_subscriber_overtaken_while_it_looks_finds_what_is_newer(
    server: redis.Redis, redis_url: str, config: WeightsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncRedis.from_url(redis_url) as client:
        subscriber = RedisWeightSubscriber(client, RUN, config, Path("unused"))
        with Learner(server, config) as learner:
            learner.publish(0)
        readable = FilesystemTransport.readable
        seen: list[int] = []

        def slow(transport: FilesystemTransport, manifest: Manifest) -> bool:
            seen.append(manifest.version)
            if seen == [0]:
                with Learner(server, config) as learner:
                    for version in range(1, 4):
                        learner.publish(version)
            return readable(transport, manifest)

        monkeypatch.setattr(FilesystemTransport, "readable", slow)
        manifest = await subscriber.newest()
    assert manifest is not None
    assert manifest.version == 3
    assert 0 in seen


def test_only_the_last_versions_stay(server: redis.Redis, config: WeightsConfig) -> None:
    with Learner(server, config) as learner:
        for version in range(5):
            learner.publish(version)
    assert sorted(server.hkeys(KEYS.manifests)) == [b"3", b"4"]  # type: ignore[type-var]
    assert len(files(config)) == 2


async def test_a_replayed_version_changes_nothing(server: redis.Redis, redis_url: str, config: WeightsConfig) -> None:
    with Learner(server, config) as learner:
        for version in range(3):
            learner.publish(version)
    before = server.hgetall(KEYS.manifests), files(config)
    with Learner(server, config, epoch=2) as restarted:
        for version in range(3):
            restarted.publish(version, value=100.0)
    assert (server.hgetall(KEYS.manifests), files(config)) == before
    assert await read(redis_url, config) == (2, 2.0)


async def test_an_older_epoch_is_fenced_off_and_leaves_nothing(
    server: redis.Redis, redis_url: str, config: WeightsConfig
) -> None:
    server.set(KEYS.epoch, 2)
    learner = Learner(server, config, epoch=1)
    learner.publish(0)
    with pytest.raises(FencedError, match="epoch is 1, the newest is 2"):
        learner.publisher.close()
    assert await read(redis_url, config) is None
    assert files(config) == []


async def test_lost_versions_are_announced_again(server: redis.Redis, redis_url: str, config: WeightsConfig) -> None:
    with Learner(server, config) as learner:
        for version in range(6):
            learner.publish(version)
    assert cleanup(RUN, config, Path("unused")) == 2
    assert await read(redis_url, config) is None
    with Learner(server, config, epoch=2) as resumed:
        assert resumed.publisher.newest() is None
        resumed.publish(3)
        resumed.publisher.flush()
        assert await read(redis_url, config) == (3, 3.0)
        assert progress(server) == {b"version": b"5", b"step": b"3"}, "admission continues from what can be read"
        for version in (4, 5, 6):
            resumed.publish(version)
    assert await read(redis_url, config) == (6, 6.0)
    assert progress(server) == {b"version": b"6", b"step": b"6"}


async def test_a_version_is_not_replaced_while_a_newer_one_can_be_read(
    server: redis.Redis, redis_url: str, config: WeightsConfig
) -> None:
    with Learner(server, config) as learner:
        learner.publish(0)
        learner.publish(1)
        oldest = min(files(config), key=lambda path: path.name)
        oldest.unlink()
        learner.publish(0, value=100.0)
    assert await read(redis_url, config) == (1, 1.0)


async def test_announcing_does_not_hold_up_the_next_step(
    server: redis.Redis, config: WeightsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Learner(server, config) as learner:
        stage, may_store = learner.publisher._transport.stage, threading.Event()

        def slow_stage(*args: object) -> object:
            may_store.wait(60)
            return stage(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(learner.publisher._transport, "stage", slow_stage)
        started = time.monotonic()
        learner.publish(0)
        assert time.monotonic() - started < 30
        assert learner.publisher.newest() is None
        may_store.set()
    assert progress(server)[b"version"] == b"0"


async def test_a_failed_announcement_is_raised_by_the_next_call(server: redis.Redis, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    learner = Learner(server, WeightsConfig(transport="fs", url=str(tmp_path / "file" / "weights")))
    learner.publish(0)
    with pytest.raises(WeightsError, match="cannot write weights"):
        learner.publish(1)
    learner.publisher.close()
    assert progress(server) == {}


async def test_a_version_waits_for_a_store_that_is_down(
    server: redis.Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica continues with the version that it has; a publisher that is to stop waits no longer."""
    monkeypatch.setattr(S3FileSystem, "retries", 1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    config = WeightsConfig(transport="fs", url=f"s3://{BUCKET}/weights")
    failures: list[str] = []
    with s3_bucket() as port:
        learner = Learner(server, config, should_retry=lambda error: not failures.append(str(error)))
        learner.publish(0)
        learner.publisher.flush()
        subscriber = RedisWeightSubscriber(AsyncRedis.from_url(redis_url), RUN, config, Path("unused"))
        manifest = await subscriber.newest()
        assert manifest is not None
    for name, value in s3_environment(port).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WeightsError, match="version 0 is gone or can't be reached"):
        async with subscriber.fetch(manifest):
            pass
    with pytest.raises(StoreUnavailableError, match="cannot list"):
        FilesystemTransport("run", f"s3://{BUCKET}/weights").stored()
    stopped = Learner(server, config)
    stopped.publish(1)
    with pytest.raises(StoreUnavailableError, match="cannot write weights to runs"):
        stopped.publisher.flush()
    stopped.publisher.close()
    learner.publish(1)
    await wait_until(lambda: bool(failures))
    with s3_server(port):
        learner.publisher.flush()
        assert await read(redis_url, config) == (1, 1.0)
        learner.publisher.close()


def test_missing_credentials_are_an_error_that_is_not_waited_for(
    server: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    S3FileSystem.clear_instance_cache()
    config = WeightsConfig(transport="fs", url=f"s3://{BUCKET}/weights")
    waited: list[Exception] = []
    learner = Learner(server, config, should_retry=lambda error: not waited.append(error))
    learner.publish(0)
    with pytest.raises(WeightsError, match="NoCredentialsError: Unable to locate credentials"):
        learner.publisher.flush()
    assert waited == []
    learner.publisher.close()


async def test_an_announcement_whose_answer_was_lost_stands(
    server: redis.Redis, redis_url: str, config: WeightsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Learner(server, config)
    announce, answers = learner.publisher._script, []

    def lossy(**arguments: Any) -> object:
        answers.append(announce(**arguments))
        if len(answers) == 2:
            raise redis.ConnectionError("the answer got lost")
        if len(answers) == 1:
            answers.append(announce(**arguments))  # redis-py itself asks again
        return answers[-1]

    monkeypatch.setattr(learner.publisher, "_script", lossy)
    learner.publish(0)
    learner.publisher.flush()
    assert answers == [[b"announced"], [b"announced"]]
    assert await read(redis_url, config) == (0, 0.0)
    answers[:] = answers[:1]
    learner.publish(1)
    with pytest.raises(redis.ConnectionError):
        learner.publisher.close()
    assert await read(redis_url, config) == (1, 1.0)


async def test_a_redis_that_does_not_answer_is_retryable(config: WeightsConfig) -> None:
    async with AsyncRedis(host="127.0.0.1", port=1, retry=Retry(NoBackoff(), 0)) as client:
        subscriber = RedisWeightSubscriber(client, RUN, config, Path("unused"))
        for call in (subscriber.newest(), subscriber.wait_newer(-1, 1.0), subscriber.report("r", 0)):
            with pytest.raises(RetryableError, match="Redis does not answer"):
                await call


async def test_a_waiting_subscriber_hears_of_a_version_at_once(
    server: redis.Redis, redis_url: str, config: WeightsConfig
) -> None:
    async with AsyncRedis.from_url(redis_url) as client:
        subscriber = RedisWeightSubscriber(client, RUN, config, Path("unused"))
        waiting = asyncio.create_task(subscriber.wait_newer(-1, 30.0))
        await wait_until(lambda: int(server.info("clients")["blocked_clients"]) == 1)  # type: ignore[index]
        with Learner(server, config) as learner:
            learner.publish(0)
            async with asyncio.timeout(25):
                manifest = await waiting
    assert manifest is not None
    assert manifest.version == 0
    assert [spec.name for spec in manifest.tensors] == ["w"]


async def test_waiting_ends_when_the_time_is_over(redis_url: str, config: WeightsConfig) -> None:
    async with AsyncRedis.from_url(redis_url) as client:
        assert await RedisWeightSubscriber(client, RUN, config, Path("unused")).wait_newer(-1, 0.05) is None


async def test_no_read_lasts_for_longer_than_a_dead_connection_goes_unnoticed(
    redis_url: str, config: WeightsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks: list[int] = []

    async def noted(_: object, *, block: int) -> None:
        blocks.append(block)
        raise redis.ConnectionError("that is enough")

    async with AsyncRedis.from_url(redis_url) as client:
        monkeypatch.setattr(client, "xread", noted)
        with pytest.raises(RetryableError):
            await RedisWeightSubscriber(client, RUN, config, Path("unused")).wait_newer(-1, 30.0)
    assert max(blocks) < SOCKET_TIMEOUT_S * 1000


def test_the_base_of_adapters_is_needed_until_it_is_stored(server: redis.Redis, config: WeightsConfig) -> None:
    with Learner(server, config, adapter={"r": 1}) as learner:
        base, adapter = ("w", torch.zeros(4)), ("base_model.model.w.lora_A.weight", torch.ones(1, 4))
        assert learner.publisher.needs_base()
        learner.publisher.publish(0, 0, [base, adapter])
        assert not learner.publisher.needs_base(), "it has waited for the announcement in progress"
        learner.publisher.publish(1, 1, [adapter])
        learner.publisher.flush()
        newest = learner.publisher.newest()
        assert newest is not None
        assert newest.anchor is not None
        assert newest.version == 1
        Path(newest.anchor.location).unlink()
        assert learner.publisher.needs_base()
    with Learner(server, config, epoch=2) as merged:
        assert merged.publisher.needs_base()
