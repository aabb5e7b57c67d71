"""Ranks of a learner on other nodes, which meet rank 0 through Redis.

Invariants: a world is one start of rank 0 with all of its ranks, which end together; ranks of an abandoned world end
within `ABSENCE_TIMEOUT_S`.
"""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from redis import Redis
from redis.exceptions import RedisError

from offbeat.services.keys import RunKeys
from offbeat.services.redis.connection import local_address
from offbeat.trainer.engines.node_ranks import RANKS_PER_NODE, NodeRanks, decode_ranks, encode_ranks
from offbeat.trainer.process.heartbeat import Heartbeat
from offbeat.trainer.process.rank_processes import FollowerRanks, RankDiedError, gloo_interface, start_rank

logger = logging.getLogger(__name__)

WORLD_TTL_S = 6.0
"""Time until a world without rank 0 is removed."""
ABSENCE_TIMEOUT_S = 6.0
"""Time until ranks of a removed world are killed; a Redis that has forgotten it gets it again."""
CHECK_INTERVAL_S = 0.5
SOCKET_TIMEOUT_S = 2.0
ADDRESS, PORT, SIZES, FAILURE, CLOSED = "address", "port", "sizes", "failure", "closed"


def worlds_key(run_id: str) -> str:
    return RunKeys(run_id).key("learner", "worlds")


def world_key(run_id: str, world: str) -> str:
    return RunKeys(run_id).key("learner", "world", world)


def _connect(redis_url: str) -> Redis:
    return Redis.from_url(redis_url, socket_timeout=SOCKET_TIMEOUT_S, socket_connect_timeout=SOCKET_TIMEOUT_S)


class RemoteRanks:
    """Rank 0's side of a world."""

    def __init__(self, redis_url: str, run_id: str, ranks_per_node: Sequence[NodeRanks]) -> None:
        self.num_local = ranks_per_node[0].total
        self._redis = _connect(redis_url)
        self.address = local_address(self._redis)
        self._worlds, self._id = worlds_key(run_id), uuid.uuid4().hex
        self._key = world_key(run_id, self._id)
        self._fields: dict[str, str | int] = {SIZES: encode_ranks(ranks_per_node)}
        self._failure = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep_open, name="remote-ranks", daemon=True)

    def open(self, port: int) -> None:
        """Invite the other nodes to a rendezvous at `port`."""
        self._fields |= {ADDRESS: self.address, PORT: port}
        self._thread.start()

    def check(self) -> None:
        """Raise `RankDiedError` if another node has reported a dead rank."""
        if self._failure:
            raise RankDiedError(self._failure)

    def close(self) -> None:
        """Let the other nodes end their ranks."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(2 * SOCKET_TIMEOUT_S)
        try:
            if self._redis.exists(self._key):
                self._redis.hset(self._key, CLOSED, "1")
        except RedisError as error:
            logger.warning("can't end the ranks of other nodes, which time out: %s", error)
        self._redis.close()

    def _keep_open(self) -> None:
        while not self._closed.is_set():
            try:
                with self._redis.pipeline() as pipe:
                    pipe.hset(self._key, mapping=self._fields)
                    pipe.pexpire(self._key, int(WORLD_TTL_S * 1000))
                    pipe.sadd(self._worlds, self._id)
                    pipe.hget(self._key, FAILURE)
                    failure = pipe.execute()[-1]
                self._failure = self._failure or (failure or b"").decode()
            except RedisError as error:
                logger.warning("can't reach the ranks of other nodes: %s", error)
            self._closed.wait(CHECK_INTERVAL_S)


@dataclass
class _Joined:
    ranks: FollowerRanks
    absent_since: float | None = None
    is_reported: bool = False


class FollowerHost:
    """A node's ranks in every world of a run."""

    def __init__(
        self,
        run_id: str,
        redis_url: str,
        node: int,
        *,
        timeout_s: float,
        command: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        """node: position among the learner's nodes, from 1. timeout_s: silence after which a rank is killed."""
        self._run_id = run_id
        self._redis_url = redis_url
        self._node = node
        self._timeout_s = timeout_s
        self._command = list(command) or [sys.executable, "-m", "offbeat.trainer.cli", run_id]
        self._environment = dict(environment or {})
        self._log = log
        self._joined: dict[str, _Joined] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def pids(self) -> list[int]:
        return [pid for joined in list(self._joined.values()) for pid in joined.ranks.pids]

    def start(self) -> None:
        """Follow in a thread, with which the ranks die."""
        if self._thread is None or not self._thread.is_alive():
            self._stop.clear()
            self._thread = threading.Thread(target=self.run, name="follower host", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the node's ranks."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def run(self) -> None:
        """Follow until `stop`."""
        with _connect(self._redis_url) as redis:
            try:
                while not self._stop.wait(CHECK_INTERVAL_S):
                    self.follow_once(redis)
            finally:
                for joined in self._joined.values():
                    joined.ranks.kill()
                self._joined.clear()

    def follow_once(self, redis: Redis) -> None:
        """Join new worlds, report dead ranks and leave ended worlds."""
        try:
            names = {name.decode() for name in cast(set[bytes], redis.smembers(worlds_key(self._run_id)))}
            for world in names | self._joined.keys():
                fields = cast(dict[bytes, bytes], redis.hgetall(world_key(self._run_id, world)))
                self._follow(redis, world, {name.decode(): value.decode() for name, value in fields.items()})
        except RedisError as error:  # the ranks' own connections end them with rank 0
            logger.warning("can't reach Redis: %s", error)

    def _follow(self, redis: Redis, world: str, fields: Mapping[str, str]) -> None:
        joined = self._joined.get(world)
        if PORT in fields and CLOSED not in fields:
            if joined is None:
                self._join(world, fields, local_address(redis))
            else:
                joined.absent_since = None
                self._report(redis, world, joined)
        elif joined is None:
            redis.srem(worlds_key(self._run_id), world)
        else:
            joined.absent_since = joined.absent_since or time.monotonic()
            if CLOSED in fields or time.monotonic() > joined.absent_since + ABSENCE_TIMEOUT_S:
                joined.ranks.kill()
                del self._joined[world]

    def _join(self, world: str, fields: Mapping[str, str], own_address: str) -> None:
        sizes = [node.total for node in decode_ranks(fields[SIZES])]
        if self._node >= len(sizes):
            return
        first = sum(sizes[: self._node])
        address = {"MASTER_ADDR": fields[ADDRESS], "MASTER_PORT": fields[PORT], "WORLD_SIZE": str(sum(sizes))}
        local = {"LOCAL_WORLD_SIZE": str(sizes[self._node]), RANKS_PER_NODE: fields[SIZES]}
        environment = {**gloo_interface(own_address), **os.environ, **self._environment, **address, **local}
        logger.info("node %d: ranks %d to %d of %d", self._node, first, first + sizes[self._node] - 1, sum(sizes))
        heartbeats = [Heartbeat(self._timeout_s) for _ in range(sizes[self._node])]
        processes: list[subprocess.Popen[bytes]] = []
        for number, heartbeat in enumerate(heartbeats):
            processes.append(start_rank(self._command, first + number, number, heartbeat, environment, self._log))
        self._joined[world] = _Joined(FollowerRanks(processes, heartbeats, first_rank=first, world_size=sum(sizes)))

    def _report(self, redis: Redis, world: str, joined: _Joined) -> None:
        if joined.is_reported:
            return
        try:
            joined.ranks.kill_hung()
            joined.ranks.check()
        except RankDiedError as error:
            logger.error("%s", error)
            with redis.pipeline() as pipe:
                pipe.hset(world_key(self._run_id, world), FAILURE, f"{error} on {socket.gethostname()}")
                pipe.pexpire(world_key(self._run_id, world), int(WORLD_TTL_S * 1000))
                pipe.execute()
            joined.is_reported = True
