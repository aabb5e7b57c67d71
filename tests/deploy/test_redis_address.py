"""Redis of a run is found from the files of the mesh, by their owner alone."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.deploy.cli.learner import Target, UnknownRedisError, find_target
from offbeat.deploy.redis_address import URL_FILE, resolve_url
from offbeat.deploy.run_folder import CONFIG, Endpoints, claim, locked, make_private, write_config, write_endpoints
from offbeat.services.buffer.config import RedisConfig
from offbeat.services.errors import MeshError
from offbeat.services.process import free_port
from offbeat.services.redis.connection import connect
from offbeat.services.redis.server import EmbeddedRedis
from offbeat.services.redis.url_file import create_url_file
from offbeat.services.telemetry import configure_logging

NOBODY = 65534


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs"
    make_private(folder / "lake")
    write_config(folder / "lake", "exp_name: lake\n")
    return folder


@pytest.fixture
def deployed(runs: Path) -> str:
    """URL of a Redis that is deployed beside the runs."""
    return create_url_file(runs / URL_FILE, "redis://127.0.0.1:6390/0")


@pytest.mark.parametrize("run", ["lake", "runs/lake", "elsewhere"])
def test_a_deployed_mesh_needs_no_url(deployed: str, run: str):
    assert find_target(run, None) == Target(run.removeprefix("runs/"), deployed)


@pytest.mark.usefixtures("deployed")
def test_an_active_train_command_comes_before_the_deployed_mesh(runs: Path):
    with locked(runs / "lake"):
        write_endpoints(runs / "lake", Endpoints(os.getpid(), "redis://:own@127.0.0.1:1/0", "http://127.0.0.1:2"))
        assert find_target("lake", None).redis_url == "redis://:own@127.0.0.1:1/0"


def test_a_file_is_taken_for_a_url(runs: Path, deployed: str):
    assert find_target("lake", str(runs / URL_FILE)).redis_url == deployed
    with pytest.raises(UnknownRedisError, match="expected a URL, or a file with one"):
        find_target("lake", "nowhere")


@pytest.mark.parametrize("url", ["http://localhost:6379", "redis://localhost:port/0", "redis://:a/b@host:6379/0"])
def test_a_url_of_no_redis_is_refused(url: str):
    with pytest.raises(MeshError, match="--redis: "):
        resolve_url(url)


@pytest.mark.usefixtures("runs")
def test_an_unknown_redis_is_reported_with_the_ways_to_name_it():
    with pytest.raises(UnknownRedisError, match=r"pass its Redis as --redis, a URL or a file .* runs/redis/url"):
        find_target("lake", None)


@pytest.mark.parametrize("damaged", [b"exp_name: [", b"\xff"])
def test_a_damaged_configuration_of_a_run_is_reported(runs: Path, damaged: bytes):
    (runs / "lake" / CONFIG).write_bytes(damaged)
    with pytest.raises(UnknownRedisError, match=r"config.yaml can't be read: \S.*\S$"):
        find_target("lake", "redis://127.0.0.1:1/0")


READ_ALL = f"""
import os, pathlib, sys
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
readable = []
for path in map(pathlib.Path, sys.argv[1:]):
    try:
        path.read_bytes()
    except OSError as error:
        continue
    readable.append(path.name)
print(*sorted(readable))
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Folder that every user may enter; `tmp_path` is closed."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="acts as another user")
def test_another_user_reads_nothing_of_a_run_or_its_redis(open_folder: Path):
    (open_folder / "open").write_text("for everyone")
    url = create_url_file(open_folder / URL_FILE, f"redis://127.0.0.1:{free_port()}/0")
    password, port = url.split("@")[0].rpartition(":")[2], int(url.rpartition(":")[2].partition("/")[0])
    run = open_folder / "lake"
    make_private(run)
    write_config(run, "exp_name: lake\n")
    configure_logging("offbeat", run / "logs")
    (run / "evaluations").mkdir()
    (run / "evaluations" / "step-000000.jsonl").write_text("prompt")
    with (
        EmbeddedRedis((open_folder / URL_FILE).parent, RedisConfig(), port=port, password=password),
        connect(url) as redis,
    ):
        redis.set("prompt", "secret")
        files = [path for path in open_folder.rglob("*") if path.is_file()]
        done = subprocess.run(
            [sys.executable, "-IS", "-c", READ_ALL, *map(str, files)],
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
        )
    assert {CONFIG, "url", "appendonly.aof", "offbeat.log", "step-000000.jsonl"} <= {path.name for path in files}
    assert (done.returncode, done.stdout.split()) == (0, ["open"]), done.stderr


def test_a_claimed_folder_and_an_earlier_runs_are_for_their_owner_alone(tmp_path: Path):
    folder = tmp_path / "lake"
    for _ in range(2):
        claim(folder, "lake", resume=False)
        write_config(folder, "exp_name: lake\n")
    assert [path.stat().st_mode & 0o777 for path in (folder, tmp_path / "lake.1")] == [0o700] * 2
