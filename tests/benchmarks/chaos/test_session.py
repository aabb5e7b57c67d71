"""Chaos: its plan is fixed by the seed, it does what it names, and it passes only where nothing is wrong."""

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import psutil
import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry
from typer.testing import CliRunner

from offbeat.benchmarks.chaos import proxy
from offbeat.benchmarks.chaos.failover import fail_over
from offbeat.benchmarks.chaos.faults import (
    FAULTS,
    PROCESSES,
    Fault,
    FaultKind,
    plan,
    processes_of,
    strike,
)
from offbeat.benchmarks.chaos.options import write_report
from offbeat.benchmarks.chaos.report import ChaosReport, InjectedFault
from offbeat.deploy.cli.app import app
from offbeat.services.buffer.config import RedisConfig
from offbeat.services.redis.server import EmbeddedRedis, server_binary
from tests.paths import ROOT
from tests.processes import has_ended
from tests.waiting import wait_until_sync

pytestmark = pytest.mark.slow


def test_plan_is_seeded_and_balances_the_kinds():
    assert plan(40, 3) == plan(40, 3) != plan(40, 4)
    counts = Counter(fault.name for fault in plan(2 * len(FAULTS) + 5, 1))
    assert set(counts.values()) == {2, 3}
    assert len(plan(7, 1)) == 7


def test_plan_can_be_restricted_by_name():
    assert {fault.name for fault in plan(9, 1, "emptied")} == {"Redis emptied"}
    with pytest.raises(ValueError, match="no fault is named like 'earthquake': env worker killed, "):
        plan(1, 1, "earthquake")


def test_every_kind_of_process_is_killed_and_stopped():
    for act in (FaultKind.KILL, FaultKind.STOP):
        assert {fault.target for fault in FAULTS if fault.act is act} == set(PROCESSES.values())
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "victim-of-chaos"])
    # The kernel closes the pipe that Popen waits for before it sets the new command line.
    wait_until_sync(lambda: "victim-of-chaos" in psutil.Process(process.pid).cmdline())
    yield process
    process.kill()
    process.wait()


def test_a_victim_is_found_by_its_command_line_and_killed(child: subprocess.Popen[bytes]):
    (victim,) = processes_of([psutil.Process()], "victim-of-chaos")
    assert victim.pid == child.pid
    assert strike(Fault("kill", FaultKind.KILL, "victim-of-chaos"), victim, random.Random(1)) == 0.0
    assert child.wait(30) == -9
    assert processes_of([psutil.Process()], "victim-of-chaos") == []


def test_a_stopped_victim_continues_afterwards(child: subprocess.Popen[bytes]):
    seen: list[str] = []
    victim = psutil.Process(child.pid)

    def sleep(_: float) -> None:
        wait_until_sync(lambda: victim.status() == psutil.STATUS_STOPPED)
        seen.append(victim.status())

    assert 2 <= strike(Fault("stop", FaultKind.STOP, "victim"), victim, random.Random(1), sleep) <= 8
    wait_until_sync(lambda: victim.status() != psutil.STATUS_STOPPED)
    assert seen == [psutil.STATUS_STOPPED]


def test_a_report_passes_only_where_nothing_is_wrong():
    good = ChaosReport(1, [InjectedFault("a", 0.0, 3, next_step_s=2.0)], exit_code=0, audit={"proven": True})
    assert good.passed
    assert good.as_tree()["by_kind"] == {"a": {"count": 1, "back_s": None, "two_steps_s": {"median": 2.0, "max": 2.0}}}
    for wrong in (
        {"exit_code": 1},
        {"exit_code": None},
        {"audit": {"proven": False}},
        {"leftovers": ["process 7"]},
        {"complaints": ["no"]},
    ):
        assert not ChaosReport(**{"seed": 1, "exit_code": 0, "audit": {"proven": True}, **wrong}).passed


def order(orders: Path, condition: str, seconds: float) -> Path:
    (orders / "aside").write_text(str(seconds))
    return (orders / "aside").rename(orders / f"redis-{condition}")


def test_proxied_connections_are_delayed_silenced_torn_and_cut(tmp_path: Path):
    orders = tmp_path / "orders"
    orders.mkdir()
    program = proxy.write_server_script(orders / "server", server_binary(None), orders)
    with (
        EmbeddedRedis(tmp_path / "redis", RedisConfig(server=program)) as server,
        Redis.from_url(server.url, socket_timeout=3.0, retry=Retry(NoBackoff(), 0)) as client,
    ):
        assert client.set("key", "x" * 100_000)
        assert "redis-server" in psutil.Process(server.pid).name()
        slow = order(orders, "delayed", 3.5)
        with pytest.raises(RedisTimeoutError):
            wait_until_sync(lambda: not client.ping())
        slow.unlink()
        wait_until_sync(lambda: answers(client))
        order(orders, "silent", 600.0)
        with pytest.raises(RedisTimeoutError):
            wait_until_sync(lambda: not client.ping())
        order(orders, "silent", 0.0)
        wait_until_sync(lambda: answers(client))
        order(orders, "torn", 600.0)
        with pytest.raises(RedisConnectionError):
            wait_until_sync(lambda: not client.get("key"))
        order(orders, "torn", 0.0)
        wait_until_sync(lambda: answers(client))
        connection = connection_of(client)
        order(orders, "cut", 0.0)
        wait_until_sync(lambda: connection_of(client) not in (None, connection))
        assert client.get("key") == b"x" * 100_000
        (first,) = psutil.Process(server.pid).children()
        server.restart()
        assert client.get("key") == b"x" * 100_000
        wait_until_sync(lambda: has_ended(first.pid))


def test_a_lagging_replica_replaces_the_server_at_its_address(tmp_path: Path):
    orders = tmp_path / "orders"
    orders.mkdir()
    program = proxy.write_server_script(orders / "server", server_binary(None), orders)
    with (
        EmbeddedRedis(tmp_path / "redis", RedisConfig(server=program)) as server,
        Redis.from_url(server.url, socket_timeout=5.0, retry=Retry(NoBackoff(), 0)) as client,
        ThreadPoolExecutor() as pool,
    ):
        client.set("before", "1")
        pid, identity = server.pid, run_id_of(client)
        seen: list[bool] = []
        failover = pool.submit(
            fail_over,
            server.url,
            psutil.Process(pid),
            orders,
            lag=lambda: client.set("after", "1"),
            promoted=lambda: seen.append(answers(client)),
            wait=waits,
        )
        wait_until_sync(lambda: not server.is_alive() or failover.done())
        server.restart()
        failover.result()
        assert seen == [False]
        assert run_id_of(client) != identity
        assert client.keys() == [b"before"]
        client.set("since", "1")
        server.restart()
        assert sorted(client.keys()) == [b"before", b"since"], "what the replica held is in the server's own file"
        assert [path.name for path in orders.iterdir()] == ["server"]


def run_id_of(client: Redis) -> str:
    return client.info("server")["run_id"]


def waits(done: Callable[[], bool], timeout_s: float) -> bool:
    wait_until_sync(done, timeout_s)
    return True


def answers(client: Redis) -> bool:
    return connection_of(client) is not None


def connection_of(client: Redis) -> int | None:
    """Return the id that the server gave the client's connection; None if it does not answer."""
    try:
        return cast(int, client.ping() and client.client_id())
    except (RedisConnectionError, RedisTimeoutError):
        return None


FULL_DISK = """
import os, sys
from pathlib import Path
from offbeat.benchmarks.chaos.disk import SmallDisk
run = Path(sys.argv[1])
disk = SmallDisk(run)
if disk.refusal:
    sys.exit(disk.refusal)
run.mkdir()
disk.attach()
disk.fill()
try:
    (run / "checkpoints" / "a").write_bytes(bytes(2**20))
except OSError as error:
    print(os.strerror(error.errno))
disk.free()
(run / "checkpoints" / "b").write_bytes(bytes(2**20))
disk.keep()
"""


def test_a_filled_checkpoint_disk_keeps_its_files(tmp_path: Path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    if "no disk of its own" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.stdout == "No space left on device\n", done.stderr
    assert (tmp_path / "run" / "checkpoints" / "b").stat().st_size == 2**20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


PARTITION = '''
import socket, subprocess, sys, threading
from offbeat.benchmarks.chaos.second_host import SecondHost
ASK = """import socket, sys
to, timeout_s = ("127.0.0.1", int(sys.argv[1])), float(sys.argv[2])
print(socket.create_connection(to, timeout_s).recv(9).decode())"""
host = SecondHost()
if host.refusal:
    sys.exit(host.refusal)
server = socket.create_server(("127.0.0.1", 0))
port = server.getsockname()[1]
def serve():
    while True:
        connection, address = server.accept()
        connection.sendall(address[0].encode())
        connection.close()
threading.Thread(target=serve, daemon=True).start()
def ask(timeout_s=30):
    command = host.command([sys.executable, "-c", ASK, str(port), str(timeout_s)])
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout.strip() or done.stderr.strip().rpartition("\\n")[2])
ask()
host.reach_redis(f"redis://127.0.0.1:{port}/0")
ask()
host.partition()
ask(2)
host.heal()
ask()
host.close()
'''


def test_a_partition_is_silent_until_it_is_healed():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    interfaces = set(psutil.net_if_addrs())
    command = [sys.executable, "-c", PARTITION]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    if "no network of its own" in done.stderr:
        pytest.skip(done.stderr.strip())
    refused, reached, silent, healed = done.stdout.splitlines()
    assert refused == "ConnectionRefusedError: [Errno 111] Connection refused", "loopback is the host's own"
    assert (reached, silent, healed) == ("10.77.0.2", "TimeoutError: timed out", "10.77.0.2"), done.stderr
    assert set(psutil.net_if_addrs()) == interfaces


WATCHER = """
import sys
from pathlib import Path
from offbeat.benchmarks.chaos.session import CONFIG
from offbeat.benchmarks.chaos.run_monitor import RunUnderChaos
run = RunUnderChaos(CONFIG, Path(sys.argv[1]), "orphan", [], {})
print(run.process.pid, flush=True)
sys.stdin.read()
"""


def test_a_run_does_not_outlive_who_watches_it(tmp_path: Path):
    command = [sys.executable, "-c", WATCHER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as watcher:
        assert watcher.stdout is not None
        pid = int(watcher.stdout.readline())
        watcher.kill()
    wait_until_sync(lambda: has_ended(pid))


def test_a_report_is_written_into_a_folder_that_is_made(tmp_path: Path):
    write_report(tmp_path / "deep" / "report.json", {"passed": True})
    assert (tmp_path / "deep" / "report.json").read_text() == '{\n  "passed": true\n}\n'


@pytest.mark.parametrize("command", ["chaos", "soak"])
@pytest.mark.parametrize("override", ["output_dir=/elsewhere", "+exp_name=other"])
def test_the_folder_and_the_name_of_the_run_are_the_commands(command: str, override: str):
    outcome = CliRunner().invoke(app, [command, "num_env_groups=2", override], env={"COLUMNS": "200"})
    assert outcome.exit_code == 2
    assert f"{override}: set the folder with --out" in outcome.output
