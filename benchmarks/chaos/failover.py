"""Failover of the run's Redis to an asynchronous replica that lacks acknowledged writes.

The proxy accepts no connection from the primary's death until the promoted server has the replica's data, in memory and
in its append-only file.
"""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import psutil
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from offbeat.benchmarks.chaos.faults import MissedError
from offbeat.benchmarks.chaos.proxy import FAILOVER
from offbeat.services.buffer.config import RedisConfig
from offbeat.services.process import free_port
from offbeat.services.redis.server import EmbeddedRedis

SYNC_TIMEOUT_S = 30.0

Wait = Callable[[Callable[[], bool], float], bool]
"""(condition, timeout in seconds) -> met in time."""


def fail_over(
    url: str, server: psutil.Process, orders: Path, *, lag: Callable[[], None], promoted: Callable[[], None], wait: Wait
) -> None:
    """Replace the supervised `server`, started by a program of `write_server_script`, by a lagging replica.

    url: of `server`, through its proxy. lag: waits for writes that the replica lacks. promoted: called before any
    client is accepted.

    Raises:
        MissedError: the data was not copied in time.
    """
    address = urlsplit(url)
    password = unquote(address.password or "")
    with (
        TemporaryDirectory(dir=orders, prefix="replica-") as folder,
        EmbeddedRedis(Path(folder), RedisConfig(), password=password) as process,
        _client(process.url) as replica,
    ):
        replica.config_set("masterauth", password)
        replica.replicaof(address.hostname, address.port)
        if not wait(lambda: _is_in_sync(replica), SYNC_TIMEOUT_S):
            raise MissedError("the replica could not be synchronized")
        replica.replicaof("NO", "ONE")
        lag()
        private = free_port()
        with _client(address._replace(netloc=f"{address.netloc.rpartition(':')[0]}:{private}").geturl()) as successor:
            _order(orders, f"{urlsplit(process.url).port} {private}")
            try:
                server.kill()
                if not wait(lambda: _has_taken_over(successor), SYNC_TIMEOUT_S):
                    _kill(successor)
                    raise MissedError("no server took the replica's data over")
                promoted()
            finally:
                (orders / FAILOVER).unlink()


def _client(url: str) -> Redis:
    return Redis.from_url(url, socket_timeout=5.0, socket_connect_timeout=1.0)


def _order(orders: Path, content: str) -> None:
    unfinished = orders / f".{FAILOVER}"
    unfinished.write_text(content)
    unfinished.rename(orders / FAILOVER)


def _is_in_sync(replica: Redis) -> bool:
    info = cast(dict[str, Any], replica.info("replication"))
    return info.get("master_link_status") == "up"


def _has_taken_over(successor: Redis) -> bool:
    """Promote the synchronized server; return whether its data is in its append-only file."""
    try:
        if cast(dict[str, Any], successor.info("replication"))["role"] == "slave":
            if _is_in_sync(successor):
                successor.replicaof("NO", "ONE")
                successor.config_set("appendonly", "yes")
            return False
        state = cast(dict[str, Any], successor.info("persistence"))
    except (RedisConnectionError, RedisTimeoutError):  # it is starting
        return False
    return bool(state["aof_enabled"]) and not (state["aof_rewrite_in_progress"] or state["aof_rewrite_scheduled"])


def _kill(successor: Redis) -> None:
    """Kill an incompletely synchronized server; the next one loads the run's own file."""
    try:
        pid = cast(dict[str, Any], successor.info("server"))["process_id"]
    except (RedisConnectionError, RedisTimeoutError):
        return
    psutil.Process(pid).kill()
