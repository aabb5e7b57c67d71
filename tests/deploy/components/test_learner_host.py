import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import ray
from redis import Redis

from offbeat.deploy.components.learner import ManagedLearner
from offbeat.deploy.components.learner_host import (
    LEARNER_LOG,
    LearnerHost,
    LearnerStatus,
    alive_key,
    learner_command,
    learner_key,
    read_status,
    request_stop,
)
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.loader import load_run
from offbeat.services.control.interfaces import Health
from offbeat.services.errors import RetryableError
from offbeat.services.keys import ENDING, RunKeys
from offbeat.trainer.watchdog import EXIT_HUNG
from tests.paths import QUICKSTART
from tests.waiting import PATIENCE_S, wait_until_sync

pytestmark = pytest.mark.slow

PYTHON = [sys.executable, "-u", "-c"]
FOREVER = [*PYTHON, "import time; print('up'); time.sleep(1000)"]
GRACEFUL = [
    *PYTHON,
    "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up'); time.sleep(1000)",
]
STUBBORN = [
    *PYTHON,
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(1000)",
]


def is_up(folder: Path) -> bool:
    log = folder / LEARNER_LOG
    return log.exists() and "up" in log.read_text()


def has_exited(redis: Redis) -> bool:
    return read_status(redis, "r").exit_code is not None


def test_status_is_absent_before_a_learner_is_started(redis: Redis):
    assert read_status(redis, "r") == LearnerStatus(started=False, alive=False)
    request_stop(redis, "r", now=True)
    assert not read_status(redis, "r").started


@pytest.mark.parametrize(
    ("code", "reason"),
    [(0, "exit code 0"), (3, "exit code 3"), (EXIT_HUNG, "its main thread hung: see its stack in logs/learner.log")],
)
def test_exit_reason_is_reported(redis: Redis, redis_url: str, tmp_path: Path, code: int, reason: str):
    may_exit = tmp_path / "may exit"
    ending = f"import os, time\nwhile not os.path.exists({str(may_exit)!r}): time.sleep(0.01)\nraise SystemExit({code})"
    host = LearnerHost("r", redis_url, tmp_path, command=[sys.executable, "-c", ending])
    host.start()
    assert read_status(redis, "r").alive
    may_exit.touch()
    wait_until_sync(lambda: has_exited(redis))
    status = read_status(redis, "r")
    assert (status.alive, status.exit_code, status.stopping) == (False, code, False)
    assert status.end_reason == reason


@pytest.mark.parametrize(("code", "reason"), [(2, "run r: no such model"), (1, "exit code 1")])
def test_a_learner_that_gave_up_is_reported_with_its_last_message(
    redis: Redis, redis_url: str, tmp_path: Path, code: int, reason: str
):
    said = "offbeat learner: of an earlier one\nup\noffbeat learner: run r: no such model\nbye\n"
    ending = f"import sys; sys.stderr.write({said!r}); sys.exit({code})"
    LearnerHost("r", redis_url, tmp_path, command=[sys.executable, "-c", ending]).start()
    wait_until_sync(lambda: has_exited(redis))
    assert read_status(redis, "r").end_reason == reason


def test_killed_learner_is_reported_by_signal_and_can_be_restarted(redis: Redis, redis_url: str, tmp_path: Path):
    host = LearnerHost("r", redis_url, tmp_path, command=FOREVER)
    host.start()
    wait_until_sync(lambda: is_up(tmp_path) and redis.hexists(learner_key("r"), "pid"))
    first = read_status(redis, "r")
    os.kill(int(redis.hget(learner_key("r"), "pid")), signal.SIGKILL)
    wait_until_sync(lambda: has_exited(redis))
    assert read_status(redis, "r").end_reason == "killed by SIGKILL"
    assert host.wait(30)
    host.start()
    second = read_status(redis, "r")
    assert second.alive
    assert second.incarnation != first.incarnation
    request_stop(redis, "r", now=True)
    assert host.wait(30)


def test_graceful_stop_lets_learner_finish(redis: Redis, redis_url: str, tmp_path: Path):
    host = LearnerHost("r", redis_url, tmp_path, command=GRACEFUL)
    host.start()
    wait_until_sync(lambda: is_up(tmp_path))
    request_stop(redis, "r", now=False)
    wait_until_sync(lambda: has_exited(redis))
    status = read_status(redis, "r")
    assert (status.exit_code, status.stopping) == (0, True)


@pytest.mark.parametrize(("command", "code"), [(GRACEFUL, 0), (STUBBORN, -signal.SIGKILL)])
def test_host_stops_its_learner_gracefully_or_kills_it(
    redis: Redis, redis_url: str, tmp_path: Path, command: list[str], code: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("offbeat.deploy.components.learner_host.KILL_TIMEOUT_S", PATIENCE_S)
    host = LearnerHost("r", redis_url, tmp_path, command=command)
    host.start()
    wait_until_sync(lambda: is_up(tmp_path))
    host.stop(grace_s=0.5 if code else 30.0)
    assert host.wait(0)
    assert read_status(redis, "r").exit_code == code
    host.stop(grace_s=30.0)


def test_host_waits_for_the_checkpoint_of_its_learner(
    redis: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("offbeat.deploy.components.learner_host.KILL_TIMEOUT_S", PATIENCE_S)
    record = RunKeys("r").record
    redis.hset(record, "learner_doing", json.dumps({"stage": "checkpoint", "step": 1}))
    host = LearnerHost("r", redis_url, tmp_path, command=STUBBORN)
    host.start()
    wait_until_sync(lambda: is_up(tmp_path))
    stopping = threading.Thread(target=host.stop, args=(0.1,))
    stopping.start()
    stopping.join(1.5)
    assert stopping.is_alive()
    redis.hset(record, "learner_doing", json.dumps({"stage": "publish", "step": 1}))
    stopping.join(PATIENCE_S)
    assert read_status(redis, "r").exit_code == -signal.SIGKILL


def test_start_is_idempotent(redis: Redis, redis_url: str, tmp_path: Path):
    host = LearnerHost("r", redis_url, tmp_path, command=FOREVER)
    host.start()
    first = read_status(redis, "r").incarnation
    host.start()
    assert read_status(redis, "r").incarnation == first
    request_stop(redis, "r", now=True)
    assert host.wait(30)


def test_learner_exits_when_another_host_replaces_it(redis: Redis, redis_url: str, tmp_path: Path):
    first = LearnerHost("r", redis_url, tmp_path, command=FOREVER)
    first.start()
    second = LearnerHost("r", redis_url, tmp_path, command=FOREVER)
    second.start()
    assert first.wait(30)
    assert read_status(redis, "r").alive
    request_stop(redis, "r", now=True)
    assert second.wait(30)


def test_a_host_of_an_earlier_run_changes_nothing_of_a_new_run(
    redis: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Its learner dies while the new run's lives, so its standby takes over."""
    monkeypatch.setattr("offbeat.deploy.components.learner_host.STANDBY_START_INTERVAL_S", 0.0)
    redis.hset(RunKeys("r").record, "uid", "old")
    redis.hset(RunKeys("r").progress, mapping={"step": 0, "version": 0})
    old = LearnerHost("r", redis_url, tmp_path, uid="old", command=FOREVER, standby=True)
    old.start()
    wait_until_sync(lambda: len(old.pids) == 2)
    new = LearnerHost("r", redis_url, tmp_path / "new", uid="new", command=FOREVER)
    with monkeypatch.context() as patch:
        skipped: list[object] = []  # heartbeats, of which none, also none under way, sees the new run before the death
        patch.setattr(old, "_send_heartbeat", lambda *_: skipped.append(None) or "")
        wait_until_sync(lambda: skipped != [])
        redis.delete(*redis.keys("*"))
        redis.hset(RunKeys("r").record, "uid", "new")
        new.start()
        started = redis.hgetall(learner_key("r"))
        os.kill(old.pids[0], signal.SIGKILL)
        wait_until_sync(lambda: "takes over" in caplog.text)
        wait_until_sync(lambda: "writes are dropped" in caplog.text)
    assert old.wait(30), "its standby ends, as the new run has a learner"
    assert {**started, b"pid": b""} == {**redis.hgetall(learner_key("r")), b"pid": b""}
    assert redis.get(alive_key("r")) == started[b"incarnation"]
    request_stop(redis, "r", now=True)
    assert new.wait(30)
    with pytest.raises(RetryableError, match="Redis has no record of this run r"):
        old.start()
    assert read_status(redis, "r").exit_code == -signal.SIGKILL


def test_a_host_reports_its_learner_to_an_emptied_redis(redis: Redis, redis_url: str, tmp_path: Path):
    host = LearnerHost("r", redis_url, tmp_path, command=FOREVER)
    host.start()
    before = read_status(redis, "r")
    redis.flushall()
    wait_until_sync(lambda: read_status(redis, "r") == before)
    assert not host.wait(0)
    request_stop(redis, "r", now=True)
    assert host.wait(30)


def test_learner_dies_with_its_host_and_counts_as_dead(redis: Redis, redis_url: str, tmp_path: Path):
    code = f"""
        import sys, time
        from pathlib import Path
        from offbeat.deploy.components.learner_host import LearnerHost
        LearnerHost("r", {redis_url!r}, Path({str(tmp_path)!r}), command={FOREVER!r}).start()
        time.sleep(1000)
    """
    host = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    wait_until_sync(lambda: is_up(tmp_path) and redis.hexists(learner_key("r"), "pid"))
    pid = int(redis.hget(learner_key("r"), "pid"))
    host.kill()
    host.wait()

    def is_gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
        except FileNotFoundError:
            return True

    wait_until_sync(is_gone)
    redis.delete(alive_key("r"))  # what its expiry does in a few seconds
    status = read_status(redis, "r")
    assert (status.started, status.alive, status.end_reason) == (True, False, "its host is gone")


WAITS_FOR_THE_LEASE = [
    *PYTHON,
    """if True:
    import os, time
    from offbeat.services.redis.connection import connect
    from offbeat.services.redis.lease import LearnerLease, LeaseHeldError, owner_of
    lease = LearnerLease(connect(os.environ["OFFBEAT_REDIS"]), "r", owner_of(os.getpid()), 600.0)
    while True:
        try:
            lease.acquire(wait_s=1.0)
            break
        except LeaseHeldError:
            os.write(1, b"stands by %d\\n" % os.getpid())  # in one piece: the tests read the log meanwhile
    os.write(1, b"up %d\\n" % os.getpid())
    time.sleep(1000)
    """,
]


def pids_that_logged(folder: Path, prefix: str) -> list[int]:
    """Return the processes with a log line `PREFIX PID`, in order."""
    log = folder / LEARNER_LOG
    lines = log.read_text().splitlines() if log.exists() else []
    return list(dict.fromkeys(int(line.split()[-1]) for line in lines if line.startswith(prefix)))


def test_a_standby_learner_takes_over_and_is_replaced(
    redis: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The lease of the dead one would last for ten minutes."""
    monkeypatch.setattr("offbeat.deploy.components.learner_host.STANDBY_START_INTERVAL_S", 0.0)
    host = LearnerHost("r", redis_url, tmp_path, command=WAITS_FOR_THE_LEASE, standby=True)
    host.start()
    wait_until_sync(lambda: pids_that_logged(tmp_path, "up") != [])
    assert pids_that_logged(tmp_path, "stands by") == [], "a standby started before there were weights"
    redis.hset(RunKeys("r").progress, mapping={"step": 0, "version": 0})
    wait_until_sync(lambda: pids_that_logged(tmp_path, "stands by") != [])
    before = read_status(redis, "r")
    first, second = pids_that_logged(tmp_path, "up")[0], pids_that_logged(tmp_path, "stands by")[0]
    os.kill(first, signal.SIGKILL)
    wait_until_sync(lambda: pids_that_logged(tmp_path, "up") == [first, second])
    wait_until_sync(lambda: len(pids_that_logged(tmp_path, "stands by")) == 2)
    status = read_status(redis, "r")
    assert (status.alive, status.died, status.death_reason) == (True, before.incarnation, "killed by SIGKILL")
    third = pids_that_logged(tmp_path, "stands by")[1]
    request_stop(redis, "r", now=True)
    assert host.wait(30)
    assert read_status(redis, "r").exit_code == -signal.SIGKILL
    for pid in (second, third):
        assert not Path(f"/proc/{pid}").exists()


def test_a_replaced_learner_is_reported_once_redis_accepts_writes(
    redis: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("offbeat.deploy.components.learner_host.STANDBY_START_INTERVAL_S", 0.0)
    host = LearnerHost("r", redis_url, tmp_path, command=WAITS_FOR_THE_LEASE, standby=True)
    host.start()
    wait_until_sync(lambda: pids_that_logged(tmp_path, "up") != [])
    redis.hset(RunKeys("r").progress, mapping={"step": 0, "version": 0})
    wait_until_sync(lambda: pids_that_logged(tmp_path, "stands by") != [])
    before = read_status(redis, "r")
    redis.config_set("min-replicas-to-write", 1)
    try:
        os.kill(pids_that_logged(tmp_path, "up")[0], signal.SIGKILL)
        wait_until_sync(lambda: "can't report the new learner: Redis refuses writes" in caplog.text)
    finally:
        redis.config_set("min-replicas-to-write", 0)
    wait_until_sync(lambda: read_status(redis, "r").died == before.incarnation)
    wait_until_sync(lambda: read_status(redis, "r").alive)
    assert not host.wait(0)
    request_stop(redis, "r", now=True)
    assert host.wait(30)


def test_a_standby_that_fails_to_start_does_not_end_the_learner(
    redis: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("offbeat.deploy.components.learner_host.STANDBY_START_INTERVAL_S", 0.0)
    host, tries = LearnerHost("r", redis_url, tmp_path, command=FOREVER, standby=True), list[int]()

    def no_more_processes() -> subprocess.Popen[bytes]:
        tries.append(1)
        raise BlockingIOError("no more processes")

    host.start()
    wait_until_sync(lambda: is_up(tmp_path))
    monkeypatch.setattr(host, "_spawn", no_more_processes)
    redis.hset(RunKeys("r").progress, mapping={"step": 0, "version": 0})
    wait_until_sync(lambda: len(tries) > 1 or host.wait(0))
    assert read_status(redis, "r").alive
    assert not host.wait(0)
    request_stop(redis, "r", now=True)
    assert host.wait(30)


def test_standby_of_external_learner_is_rejected():
    with pytest.raises(ConfigError, match="attach a second learner instead"):
        load_run(QUICKSTART, ["control.standby_learner=true", "control.learner=external"])


def test_hung_learner_is_killed_after_its_lease_expires(
    redis: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("offbeat.deploy.components.learner_host.HANG_TIMEOUT_S", 1.0)
    host = LearnerHost("r", redis_url, tmp_path, command=WAITS_FOR_THE_LEASE)
    host.start()
    wait_until_sync(lambda: pids_that_logged(tmp_path, "up") != [])
    assert not host.wait(2.0), "a learner that holds its lease was killed"
    os.kill(pids_that_logged(tmp_path, "up")[0], signal.SIGSTOP)
    assert redis.pexpire(RunKeys("r").lease, 500)  # sooner than in ten minutes
    assert host.wait(PATIENCE_S)
    assert read_status(redis, "r").end_reason == "killed by SIGKILL"


async def test_takeover_is_reported_once_to_the_reconciler(redis: Redis, redis_url: str):
    config = load_run(QUICKSTART)
    stored = {"incarnation": "two", "pid": 1, "died": "one", "died_how": "killed by SIGKILL"}
    redis.hset(learner_key(config.exp_name), mapping=stored)
    redis.set(alive_key(config.exp_name), "two")
    learner = ManagedLearner(config, redis, redis_url)
    observation = await learner.observe()
    assert (observation.health, observation.incident) == (Health.DEAD, "one")
    assert observation.detail == "killed by SIGKILL; the standby has taken over"
    assert (await learner.observe()).health is Health.STARTING


@pytest.mark.parametrize(
    ("code", "phase", "health"),
    [
        (0, "finished", Health.DONE),
        (4, "finished", Health.DONE),  # started anew, after Redis had forgotten the one that finished
        (0, "training", Health.DEAD),
        (4, "training", Health.DEAD),
        (2, "finished", Health.BROKEN),
    ],
)
async def test_exit_codes_are_judged_by_the_runs_phase(
    redis: Redis, redis_url: str, code: int, phase: str, health: Health
):
    config = load_run(QUICKSTART)
    redis.hset(learner_key(config.exp_name), mapping={"incarnation": "one", "pid": 1, "exit_code": code})
    redis.hset(RunKeys(config.exp_name).record, "learner_phase", phase)
    assert (await ManagedLearner(config, redis, redis_url).observe()).health is health


def test_redis_password_is_not_on_the_command_line(redis_url: str, tmp_path: Path):
    report = "import os, sys; print(os.environ['OFFBEAT_REDIS'] == sys.argv[1], 'up')"
    host = LearnerHost("r", redis_url, tmp_path, command=[sys.executable, "-u", "-c", report, redis_url])
    host.start()
    assert host.wait(PATIENCE_S)
    assert (tmp_path / LEARNER_LOG).read_text() == "True up\n"
    assert learner_command("r")[1:] == ["-m", "offbeat.trainer.cli", "r"]


async def test_no_learner_is_started_while_serve_shuts_down(redis: Redis, redis_url: str):
    redis.set(ENDING, "1")
    config = load_run(QUICKSTART)
    await ManagedLearner(config, redis, redis_url).ensure()
    assert not read_status(redis, config.exp_name).started
    assert not ray.is_initialized(), "no actor was looked up"
