"""Ranks on other nodes start, die and return with rank 0."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

from offbeat.services.process import free_port
from offbeat.services.redis.connection import local_address
from offbeat.trainer.engines.node_ranks import NodeRanks
from offbeat.trainer.process import remote_ranks
from offbeat.trainer.process.rank_processes import RankDiedError, gloo_interface
from offbeat.trainer.process.remote_ranks import FollowerHost, RemoteRanks, worlds_key
from tests.waiting import wait_until_sync

RUN = "hosts"
RANK = """
import os, sys, time
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")
print(*(os.environ.get(name, "-") for name in names), flush=True)
time.sleep(600)
"""


@pytest.fixture
def hosts(redis_url: str, tmp_path: Path) -> Iterator[list[FollowerHost]]:
    """Nodes 1 and 2 of three."""
    hosts = [
        FollowerHost(
            RUN,
            redis_url,
            node,
            timeout_s=60.0,
            command=[sys.executable, "-c", RANK],
            environment={"CUDA_VISIBLE_DEVICES": f"{node},7"},
            log=tmp_path / f"node{node}",
        )
        for node in (1, 2)
    ]
    for host in hosts:
        host.start()
    yield hosts
    for host in hosts:
        host.stop()


def open_world(redis_url: str, sizes: tuple[int, ...] = (1, 2, 1)) -> RemoteRanks:
    world = RemoteRanks(redis_url, RUN, [NodeRanks(size) for size in sizes])
    world.open(free_port())
    return world


def are_gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) for pid in pids)


def test_each_node_starts_its_ranks_at_one_rendezvous(
    redis_url: str, hosts: list[FollowerHost], tmp_path: Path
) -> None:
    world = RemoteRanks(redis_url, RUN, [NodeRanks(1), NodeRanks(1, 1), NodeRanks(1)])
    port = free_port()
    world.open(port)
    address = f"127.0.0.1 {port}"
    expected = {1: [f"1 0 4 2 {address} 1,7", f"2 1 4 2 {address} 1,7"], 2: [f"3 0 4 1 {address} 2,7"]}
    for node, lines in expected.items():
        log = tmp_path / f"node{node}"
        wait_until_sync(lambda log=log, lines=lines: log.exists() and sorted(log.read_text().splitlines()) == lines)
    pids = [pid for host in hosts for pid in host.pids]
    assert len(pids) == 3
    world.close()
    wait_until_sync(lambda: are_gone(pids))


def test_a_killed_rank_ends_the_world_and_the_next_one_starts_anew(redis_url: str, hosts: list[FollowerHost]) -> None:
    world = open_world(redis_url)
    wait_until_sync(lambda: [len(host.pids) for host in hosts] == [2, 1])
    before = hosts[0].pids + hosts[1].pids
    os.kill(hosts[0].pids[1], signal.SIGKILL)

    def has_failed() -> bool:
        try:
            world.check()
        except RankDiedError as error:
            return "rank 2" in str(error) and "SIGKILL: all 4 processes exit" in str(error)
        return False

    wait_until_sync(has_failed)
    world.close()
    wait_until_sync(lambda: are_gone(before))
    again = open_world(redis_url)
    wait_until_sync(lambda: [len(host.pids) for host in hosts] == [2, 1])
    again.check()
    again.close()


def test_ranks_do_not_outlive_a_killed_rank_zero(
    redis_url: str, hosts: list[FollowerHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_ranks, "WORLD_TTL_S", 1.0)
    monkeypatch.setattr(remote_ranks, "ABSENCE_TIMEOUT_S", 1.0)
    world = open_world(redis_url)
    wait_until_sync(lambda: [len(host.pids) for host in hosts] == [2, 1])
    pids = hosts[0].pids + hosts[1].pids
    world._closed.set()  # its heartbeat ends, as a killed process's
    wait_until_sync(lambda: are_gone(pids))
    with redis.Redis.from_url(redis_url) as server:
        wait_until_sync(lambda: server.scard(worlds_key(RUN)) == 0)


def test_a_redis_that_forgets_keeps_the_ranks(
    redis_url: str, hosts: list[FollowerHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_ranks, "ABSENCE_TIMEOUT_S", 60.0)
    world = open_world(redis_url)
    wait_until_sync(lambda: [len(host.pids) for host in hosts] == [2, 1])
    pids = hosts[0].pids + hosts[1].pids
    with redis.Redis.from_url(redis_url) as server:
        server.flushall()
        wait_until_sync(lambda: server.scard(worlds_key(RUN)) == 1)
    assert hosts[0].pids + hosts[1].pids == pids
    world.close()


def test_standby_and_active_learner_have_a_world_each(redis_url: str, hosts: list[FollowerHost]) -> None:
    active, standby = open_world(redis_url), open_world(redis_url)
    wait_until_sync(lambda: [len(host.pids) for host in hosts] == [4, 2])
    active.close()
    wait_until_sync(lambda: [len(host.pids) for host in hosts] == [2, 1])
    standby.close()


def test_rank_zero_is_met_at_its_address_on_the_way_to_redis() -> None:
    for url in ("redis://127.0.0.1:6379/0", "unix:///run/redis.sock"):
        with redis.Redis.from_url(url) as server:
            assert local_address(server) == "127.0.0.1"
    assert gloo_interface("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo"}
    assert gloo_interface("192.0.2.254") == {}, "none of this host"
