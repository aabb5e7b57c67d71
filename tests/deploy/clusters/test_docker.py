"""Dockerfiles, the compose file, and the Redis that compose and Kubernetes start."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_spec import PyOptions
from ray.scripts.scripts import start as ray_start
from ray.serve.schema import ServeDeploySchema
from redis import Redis
from redis.exceptions import AuthenticationError, ConnectionError

from offbeat.deploy.cluster import apps
from offbeat.services.process import free_port
from tests.conftest import redis_server_binary
from tests.deploy.clusters.rendering import documents
from tests.deploy.clusters.test_nodes import command_path
from tests.paths import ROOT
from tests.waiting import wait_until_sync

DEPLOY = ROOT / "deploy"
COMPOSE = DEPLOY / "compose.yaml"
SERVICES: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]
DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))


def serve_configs() -> dict[str, dict[str, Any]]:
    """The deploy file of compose, and those embedded in the resources of KubeRay."""
    resources = {each["kind"]: each for each in [*documents(), *documents({"job": {"enabled": True}})]}
    texts = {
        "compose": (DEPLOY / "docker" / "deploy.yaml").read_text(),
        "RayService": resources["RayService"]["spec"]["serveConfigV2"],
        "RayJob": resources["ConfigMap"]["data"]["deploy.yaml"],
    }
    return {name: yaml.safe_load(text) for name, text in texts.items()}


def redis_commands() -> dict[str, str]:
    """The shell commands that start a Redis, by who has them."""
    stateful = next(each for each in documents() if each["kind"] == "StatefulSet")
    (argument,) = stateful["spec"]["template"]["spec"]["containers"][0]["args"]
    (command,) = SERVICES["redis"]["command"]  # in which compose writes $ as $$
    return {"compose": command.replace("$$", "$"), "Kubernetes": argument}


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_are_clean(path: Path):
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_copy_what_is_there_and_run_without_root(path: Path):
    text = path.read_text()
    scripts = re.findall(r"install -m 755 (\S+)", text)
    assert [os.access(ROOT / script, os.X_OK) for script in scripts] == [True]
    assert re.findall(r"^USER (\S+)$", text, re.MULTILINE) == ["1000"]
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not {"deploy", "services", "trainer", "envs", "benchmarks", "pyproject.toml", "README.md"} & set(ignored)
    assert "deploy/docker/secrets" in ignored


def test_compose_file_is_valid():
    options = PyOptions(apply_merge=True)
    compose = options.from_yaml(COMPOSE.read_text())
    compose.validate()
    assert set(compose.service_names()) == {"redis", "head", "deploy", "worker", "prometheus", "grafana"}
    with pytest.raises(ValueError, match="hostnam"):
        options.from_yaml(COMPOSE.read_text().replace("hostname:", "hostnam:"))


@pytest.mark.parametrize("name", ["head", "worker"])
def test_compose_starts_ray_with_options_that_it_has(name: str):
    command = SERVICES[name]["command"]
    assert command[:2] == ["ray", "start"]
    options = [re.sub(r"\$\{\w+:-(.*)\}", r"\1", option) for option in command[2:]]
    assert ray_start.make_context("start", options).params["block"]


def test_compose_deploys_again_once_the_head_has_lost_its_applications(tmp_path: Path):
    """The head's restart ends Serve, whose state is in memory; meanwhile nothing is deployed twice."""
    applied, log = tmp_path / "applied", tmp_path / "log"
    show = f"cat {applied} 2>/dev/null || echo 'No configuration was found.'"
    path = command_path(
        tmp_path,
        serve=f"echo $1 >> {log}\ncase $1 in deploy) echo 'name: control' > {applied} ;; config) {show} ;; esac",
        sleep="exec /bin/sleep .02",
    )
    service = SERVICES["deploy"]
    assert service["restart"] == "unless-stopped"

    def calls() -> list[str]:
        return log.read_text().split() if log.exists() else []

    process = subprocess.Popen(service["command"], env={**os.environ, "PATH": path})
    try:
        wait_until_sync(lambda: calls()[:4] == ["deploy", "config", "config", "config"])
        applied.unlink()
        wait_until_sync(lambda: calls().count("deploy") == 2)
        seen = len(calls())
        wait_until_sync(lambda: len(calls()) > seen + 2)
        assert calls().count("deploy") == 2
        assert process.poll() is None
    finally:
        process.terminate()
        process.wait(timeout=10)


def test_compose_publishes_on_loopback_alone():
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert len(ports) == 4
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert all("@sha256" in image or ":" in image for image in (each["image"] for each in SERVICES.values()))


def test_secrets_of_compose_are_generated_once(tmp_path: Path):
    script = shutil.copy(DEPLOY / "docker" / "make_secrets.sh", tmp_path)
    subprocess.run([script], check=True)
    names = yaml.safe_load(COMPOSE.read_text())["secrets"]
    files = {name: tmp_path / Path(each["file"]).relative_to("docker") for name, each in names.items()}
    before = {name: path.read_text() for name, path in files.items()}
    assert re.fullmatch(r"redis://:[0-9a-f]{64}@redis:6379/0", before["redis-url"])
    assert len(set(before.values())) == 3
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700
    subprocess.run([script], check=True)
    assert {name: path.read_text() for name, path in files.items()} == before
    subprocess.run([script, "offbeat-redis"], check=True)
    assert files["redis-url"].read_text() == before["redis-url"].replace("@redis:", "@offbeat-redis:")
    assert files["redis-url"].stat().st_mode & 0o777 == 0o444


@pytest.mark.parametrize("name", serve_configs())
def test_the_embedded_deploy_files_are_one_that_builds(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    configs = serve_configs()
    (application,) = configs[name]["applications"]
    assert application["args"].pop("max_cpus", None) == (None if name == "compose" else 68)
    assert configs[name] == configs["compose"]
    (tmp_path / "redis-url").write_text("redis://:secret@redis:6379/0")
    (tmp_path / "token").write_text("mine")
    schema = ServeDeploySchema.model_validate(configs[name])
    assert schema.http_options.host == "0.0.0.0"
    paths = ((key, str(value).replace("/etc/offbeat", str(tmp_path))) for key, value in application["args"].items())
    deployment = apps.control(dict(paths) | {"max_cpus": 68})._bound_deployment
    (settings,) = deployment.init_args
    assert deployment.name == application["deployments"][0]["name"]
    assert (settings.tokens.operate, settings.max_cpus) == ("mine", 68)
    assert str(settings.working_dir) == "/mesh"


@pytest.fixture(params=redis_commands())
def started(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """Port of a server that was started by a container's command, with another folder and port."""
    port = free_port()
    (tmp_path / "redis-url").write_text("redis://:secret@redis:6379/0")
    command = redis_commands()[request.param]
    for there, here in {
        "/run/secrets": tmp_path,
        "/etc/offbeat": tmp_path,
        "/tmp/redis.conf": tmp_path / "redis.conf",
        "dir /data": f"dir {tmp_path}' 'port {port}",
        "exec redis-server": f"exec {redis_server_binary()}",
    }.items():
        command = command.replace(there, str(here))
    process = subprocess.Popen(["sh", "-c", command], stdout=subprocess.DEVNULL)
    try:
        wait_until_sync(lambda: answers(port))
        yield port
    finally:
        process.terminate()
        process.wait(timeout=10)


def answers(port: int) -> bool:
    with Redis(port=port, password="secret") as client, suppress(ConnectionError):
        return bool(client.ping())
    return False


def test_redis_of_a_container_has_the_password_and_an_append_only_file(started: int):
    with Redis(port=started) as anonymous, pytest.raises(AuthenticationError):
        anonymous.ping()
    with Redis(port=started, password="secret") as client:
        wanted = {"appendonly": "yes", "maxmemory-policy": "noeviction", "save": ""}
        assert {name: client.config_get(name)[name] for name in wanted} == wanted  # type: ignore[index]
