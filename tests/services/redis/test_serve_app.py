import os
import socket
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import ConnectionError

from offbeat.services.buffer.config import RedisConfig
from offbeat.services.errors import MeshError
from offbeat.services.process import free_port
from offbeat.services.redis.serve_app import RedisDeployment, RedisSettings

ENDED = "test:ended"


def end_in_order(url: str) -> None:
    with Redis.from_url(url) as redis:
        redis.set(ENDED, "in order")


def end_in_vain(url: str) -> None:
    raise RuntimeError(url)


def deployed(folder: Path, before_end: str | None) -> tuple[RedisDeployment, str]:
    url = f"redis://:secret@127.0.0.1:{free_port()}/0"
    return RedisDeployment(RedisSettings.of(url, folder, RedisConfig(appendfsync="always"), before_end)), url


def test_who_needs_the_server_ends_before_it_does(tmp_path: Path):
    first, url = deployed(tmp_path, f"{__name__}:end_in_order")
    first.__del__()
    with Redis.from_url(url) as redis, pytest.raises(ConnectionError):
        redis.ping()
    second, url = deployed(tmp_path, None)
    with Redis.from_url(url) as redis:
        assert redis.get(ENDED) == b"in order"
    second.__del__()


def test_the_server_ends_also_when_those_who_need_it_fail_to(tmp_path: Path):
    deployment, url = deployed(tmp_path, f"{__name__}:end_in_vain")
    with pytest.raises(RuntimeError):
        deployment.__del__()
    with Redis.from_url(url) as redis, pytest.raises(ConnectionError):
        redis.ping()


def test_a_busy_port_is_reported_with_its_program(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        url = f"redis://:secret@127.0.0.1:{other.getsockname()[1]}/0"
        with pytest.raises(MeshError, match=rf"in use by process {os.getpid()} .* set another port in redis_url"):
            RedisDeployment(RedisSettings.of(url, tmp_path, RedisConfig()))
