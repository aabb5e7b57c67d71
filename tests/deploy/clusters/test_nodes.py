"""Scripts that train one run on the nodes of a job."""

import asyncio
import json
import math
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import yaml
from ray.serve.schema import ServeDeploySchema
from redis import ConnectionError, Redis
from redis.asyncio import Redis as AsyncRedis

from offbeat.deploy.cluster import apps
from offbeat.deploy.config.loader import compose_document
from offbeat.deploy.token_file import TOKEN_FILE
from offbeat.services.buffer.config import RedisConfig
from offbeat.services.control.api import create_api
from offbeat.services.control.interfaces import Health
from offbeat.services.control.reconciler import Reconciler
from offbeat.services.control.rights import UNRESTRICTED, Rights, Tokens
from offbeat.services.control.run import RunSpec, RunState
from offbeat.services.control.service import ControlService
from offbeat.services.control.store import RunStore
from offbeat.services.process import free_port
from offbeat.services.redis.server import EmbeddedRedis
from offbeat.services.redis.url_file import read_url_file
from tests.copying import replace
from tests.paths import QUICKSTART, ROOT
from tests.services.control.api_harness import FakeRunFactory
from tests.services.control.control_fakes import FakeMesh
from tests.waiting import wait_until

NODES = ROOT / "deploy" / "nodes"
BIN = ROOT / ".venv" / "bin"
SKYPILOT: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "skypilot.yaml").read_text())
SCRIPT_TIMEOUT_S = 120.0
SCRIPTS = [
    *sorted(NODES.glob("*.sh")),
    ROOT / "deploy" / "docker" / "make_secrets.sh",
    ROOT / "deploy/slurm/offbeat.sbatch",
]


def command_path(folder: Path, **commands: str) -> str:
    """A PATH on which shell functions of the test stand before everything else."""
    for name, body in commands.items():
        script = folder / "bin" / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
    return f"{folder / 'bin'}:{BIN}:{os.environ['PATH']}"


def run(folder: Path, *arguments: object, path: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=SCRIPT_TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_shell(path: Path):
    shell = path.read_text().partition("\n")[0].removeprefix("#!")
    assert shell in ("/bin/sh", "/bin/bash")
    assert subprocess.run([shell, "-n", path], check=False).returncode == 0


@pytest.mark.parametrize("part", ["setup", "run"])
def test_skypilot_task_is_shell(part: str):
    assert subprocess.run(["bash", "-n"], input=SKYPILOT[part], text=True, check=False).returncode == 0


def test_skypilot_task_has_its_secret_from_the_command_line(tmp_path: Path):
    assert SKYPILOT["secrets"] == {"OFFBEAT_SECRET": None}
    assert (ROOT / SKYPILOT["envs"]["RUN"]).is_file()
    script = SKYPILOT["run"].replace("deploy/nodes/run_nodes.sh", "printf '%s\\n'")
    environment = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "RUN": "my.yaml"}
    done = run(tmp_path, "bash", "-c", script, path=os.environ["PATH"], **environment)
    assert done.stdout.split() == ["10.0.0.1", "2", "my.yaml"]


def test_the_deploy_file_builds_with_the_secrets_that_the_script_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every node derives the same ones, and none is on a command line."""
    path = command_path(tmp_path, ray='printf "%s\\n" "$@"; env')
    arguments = (NODES / "run_nodes.sh", "10.0.0.1", 2, "my.yaml", "seed=2")
    done = run(tmp_path, *arguments, path=path, OFFBEAT_SECRET="text", RAY_START="--num-cpus=3 --num-gpus=1")
    assert done.returncode == 0, done.stderr
    ray_arguments, _, rest = done.stdout.partition("\n--\n")
    assert ray_arguments.split() == [
        *("symmetric-run", "--address", "10.0.0.1:6379", "--min-nodes", "2", "--num-cpus=3", "--num-gpus=1")
    ]
    entrypoint = rest.split("\n")[:5]
    assert entrypoint == [
        *(str(NODES / name) for name in ("with_redis.sh", "run_once.sh", "deploy.yaml")),
        "my.yaml",
        "seed=2",
    ]
    assert "OFFBEAT_SECRET" not in rest
    assert "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S=60\n" in rest
    monkeypatch.chdir(tmp_path)
    url, token = read_url_file(Path("runs/redis/url")), TOKEN_FILE.read_text().strip()
    assert url not in done.stdout
    assert token not in done.stdout
    assert [path.stat().st_mode & 0o777 for path in (Path("runs/redis/url"), TOKEN_FILE)] == [0o600, 0o600]
    schema = ServeDeploySchema.model_validate(yaml.safe_load((NODES / "deploy.yaml").read_text()))
    (application,) = schema.applications
    (settings,) = apps.control(application.args)._bound_deployment.init_args
    assert (settings.redis_url, settings.tokens.operate) == (url, token)
    assert schema.http_options.host == "127.0.0.1"
    run(tmp_path, *arguments, path=path, OFFBEAT_SECRET="text")
    assert read_url_file(Path("runs/redis/url")) == url


def test_a_second_job_of_a_folder_is_refused_while_the_first_has_it(tmp_path: Path):
    """Its control service would take over the first one's run, and both Redis servers write one append-only file."""
    path = command_path(tmp_path, ray="echo up; cat", sleep="exit 0")
    arguments = [*map(str, (NODES / "run_nodes.sh", "10.0.0.1", 2, "my.yaml"))]
    environment = {**os.environ, "PATH": path, "OFFBEAT_SECRET": "first"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(arguments, cwd=tmp_path, env=environment, text=True, **pipes) as first:
        assert first.stdout
        assert first.stdout.readline() == "up\n"
        files = [tmp_path / "runs/redis/url", tmp_path / "runs/control/token"]
        written = [file.read_text() for file in files]
        refused = run(tmp_path, *arguments, path=path, OFFBEAT_SECRET="second")
        assert (refused.returncode, refused.stdout) == (1, "")
        assert f"another job uses {tmp_path}/runs/redis: wait for its end, or submit" in refused.stderr
        assert run(tmp_path, *arguments, path=path, OFFBEAT_SECRET="first").returncode == 0, "another node of the job"
        assert [file.read_text() for file in files] == written
    assert run(tmp_path, *arguments, path=path, OFFBEAT_SECRET="second").returncode == 0
    assert files[0].read_text() != written[0]


@pytest.mark.parametrize("code", [69, 127], ids=["no locks", "no flock"])
def test_jobs_run_where_the_file_system_has_no_locks(tmp_path: Path, code: int):
    path = command_path(tmp_path, ray="exit 0", flock=f"exit {code}")
    for secret in ("first", "second"):
        done = run(tmp_path, NODES / "run_nodes.sh", "10.0.0.1", 2, "my.yaml", path=path, OFFBEAT_SECRET=secret)
        assert done.returncode == 0, done.stderr


def test_a_missing_secret_is_said(tmp_path: Path):
    done = run(tmp_path, NODES / "run_nodes.sh", "10.0.0.1", 2, "my.yaml", path=command_path(tmp_path))
    assert done.returncode != 0
    assert "OFFBEAT_SECRET: set it to one random text for all nodes" in done.stderr


def test_a_command_beside_redis_has_it_and_gives_its_exit_code(tmp_path: Path):
    port, code = free_port(), 7
    url = f"redis://:secret@127.0.0.1:{port}/0"
    (tmp_path / "runs" / "redis").mkdir(parents=True)
    (tmp_path / "runs" / "redis" / "url").write_text(f"{url}\n")
    use = (
        "import redis, sys, time\n"
        "client = redis.Redis.from_url(sys.argv[1])\n"
        "while True:\n"
        "    try:\n"
        "        client.incr('n'); break\n"
        "    except redis.ConnectionError:\n"
        "        time.sleep(0.05)\n"
        "print(client.get('n').decode(), client.config_get('appendonly')['appendonly'])\n"
        "sys.exit(int(sys.argv[2]))\n"
    )
    path = command_path(tmp_path)
    for times in (1, 2):  # the second finds what the first has written
        done = run(tmp_path, NODES / "with_redis.sh", BIN / "python", "-c", use, url, code, path=path)
        assert (done.returncode, done.stdout.split()) == (code, [str(times), "yes"]), done.stderr
    with Redis(port=port, password="secret") as client, pytest.raises(ConnectionError):
        client.ping()


def test_no_second_redis_uses_a_folder(tmp_path: Path):
    folder = tmp_path / "runs" / "redis"
    with EmbeddedRedis(folder, RedisConfig()) as server:
        (folder / "url").write_text(f"{server.url}\n")
        done = run(tmp_path, NODES / "with_redis.sh", "echo", "begun", path=command_path(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"another Redis uses {folder}: wait for its end" in done.stderr


REFUSED = "echo 'offbeat: the configuration was refused' >&2; exit 2"
NO_RUN = "echo '  resume_from_checkpoint: there is no run in runs/r to resume: leave it out' >&2; exit 2"


@pytest.mark.parametrize(
    ("try_resume", "start", "watch", "resumed", "code"),
    [
        ("exit 0", "echo name", "exit 0", True, 0),
        (NO_RUN, "echo name", "exit 0", False, 0),
        ("exit 0", "echo name", "exit 1", True, 1),
        (REFUSED, "exit 2", "exit 0", True, 2),
    ],
    ids=["resumed", "new", "failed", "refused"],
)
def test_the_mesh_of_one_run_ends_with_it(
    tmp_path: Path, try_resume: str, start: str, watch: str, resumed: bool, code: int
):
    """The mesh is shut down, and the exit code is the run's; only a run that does not exist is begun."""
    path = command_path(
        tmp_path,
        serve='echo "serve $*" >> log',
        python3="exit 0",
        offbeat=f"""echo "offbeat $*" >> log
case "$2$3" in start--dry-run) {try_resume};; start*) {start};; watch*) {watch};; esac""",
    )
    (tmp_path / "token").write_text("mine")
    environment = {"OFFBEAT_TOKEN_FILE": str(tmp_path / "token")}
    done = run(tmp_path, NODES / "run_once.sh", "d.yaml", "r.yaml", "seed=2", path=path, **environment)
    assert done.returncode == code, done.stderr
    first, tried, started, *watched, last = (tmp_path / "log").read_text().splitlines()
    assert (first, last) == ("serve deploy d.yaml", "serve shutdown -y")
    assert tried == "offbeat runs start --dry-run r.yaml resume_from_checkpoint=true seed=2"
    assert started == f"offbeat runs start r.yaml resume_from_checkpoint={str(resumed).lower()} seed=2"
    assert watched == ([] if code == 2 else ["offbeat runs watch name"])


@pytest.mark.parametrize("stop_others", ["", "true"])
def test_a_job_stops_the_runs_that_killed_jobs_of_its_folder_left_active(tmp_path: Path, stop_others: str):
    """A RayJob does not: its Redis may be that of a permanent mesh."""
    path = command_path(
        tmp_path,
        serve="exit 0",
        python3=f'case "$2" in *urllib*) exit 0;; esac\nexec {BIN / "python"} "$@"',
        offbeat="""echo "offbeat $*" >> log
case "$2" in start) echo name;; list) echo '{"runs": [{"id": "old"}, {"id": "name"}, {"id": "older"}]}';; esac""",
    )
    done = run(tmp_path, NODES / "run_once.sh", "d.yaml", "r.yaml", path=path, OFFBEAT_STOP_OTHERS=stop_others)
    assert done.returncode == 0, done.stderr
    *_, last = said = (tmp_path / "log").read_text().splitlines()
    stopped = [line.split()[-1] for line in said if line.startswith("offbeat runs stop --now ")]
    assert (stopped, last) == (["old", "older"] if stop_others else [], "offbeat runs watch name")
    assert ("run old is active in Redis since an earlier job: it is stopped" in done.stderr) is bool(stop_others)


class ResumingFactory(FakeRunFactory):
    async def validate(self, document: str | dict[str, Any], rights: Rights) -> RunSpec:
        spec = await super().validate(document, rights)
        return replace(spec, resume=json.loads(spec.config).get("resume_from_checkpoint", False))


@asynccontextmanager
async def served(service: ControlService) -> AsyncIterator[str]:
    server = uvicorn.Server(
        uvicorn.Config(create_api(service, tokens=Tokens(None, None)), port=0, log_level="error", lifespan="off")
    )
    task = asyncio.create_task(server.serve())
    await wait_until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        await task


@pytest.fixture
async def async_redis(redis_url: str) -> AsyncIterator[AsyncRedis]:
    async with AsyncRedis.from_url(redis_url) as redis:
        yield redis


@pytest.mark.slow
async def test_a_job_resumes_the_run_of_a_job_that_was_killed(tmp_path: Path, async_redis: AsyncRedis):
    """Redis keeps it as active, with the configuration of its start; validation, `serve` and the mesh are the test's."""
    factory, store = ResumingFactory(async_redis), RunStore(async_redis, orphaned_after_s=math.inf)
    await store.create(await factory.validate(compose_document(QUICKSTART, []), UNRESTRICTED))
    await store.update("quickstart", state=RunState.RUNNING)
    mesh = FakeMesh()
    reconciler = Reconciler(store, lambda _: mesh, reconcile_s=0.05)
    path = command_path(tmp_path, serve='echo "serve $*" >> log')

    async def finish() -> None:
        async def is_resumed() -> bool:
            record = await store.load("quickstart")
            return (record.attempt, record.state) == (2, RunState.RUNNING)

        await wait_until(is_resumed, timeout_s=SCRIPT_TIMEOUT_S)
        mesh["learner"].health = Health.DONE

    async with served(ControlService(store, factory, wake=reconciler.wake)) as url, asyncio.TaskGroup() as tasks:
        reconciling = tasks.create_task(reconciler.run())
        tasks.create_task(finish())
        arguments = (NODES / "run_once.sh", "d.yaml", QUICKSTART, "seed=2")
        done = await asyncio.to_thread(run, tmp_path, *arguments, path=path, OFFBEAT_URL=url)
        reconciling.cancel()
    record = await store.load("quickstart")
    assert (done.returncode, record.state, record.attempt) == (0, RunState.FINISHED, 2), done.stderr
    assert (json.loads(record.config)["resume_from_checkpoint"], json.loads(record.config)["seed"]) == (True, 2)
    assert "run quickstart is active in Redis since an earlier job: it is stopped, and resumed" in done.stderr
    assert (tmp_path / "log").read_text().splitlines() == ["serve deploy d.yaml", "serve shutdown -y"]


def test_a_mesh_that_does_not_come_up_is_shut_down(tmp_path: Path):
    path = command_path(tmp_path, serve='echo "serve $*" >> log', python3="exit 1", sleep="exit 0")
    done = run(tmp_path, NODES / "run_once.sh", "d.yaml", "r.yaml", path=path, OFFBEAT_START_ATTEMPTS="3")
    assert done.returncode == 1
    assert "the control service at http://127.0.0.1:8000 does not answer" in done.stderr
    assert (tmp_path / "log").read_text().splitlines() == ["serve deploy d.yaml", "serve status", "serve shutdown -y"]


def test_slurm_job_runs_the_script_on_every_node(tmp_path: Path):
    """`scontrol` and `srun` are the test's: no Slurm is here."""
    path = command_path(
        tmp_path,
        scontrol="printf 'localhost\\nnode2\\n'",
        srun='printf "%s\\n" "$@"',
        hostname="echo 10.0.0.7 10.0.0.8",
    )
    sbatch = ROOT / "deploy" / "slurm" / "offbeat.sbatch"
    job = {"SLURM_JOB_NODELIST": "localhost,node2", "SLURM_NNODES": "2"}
    done = run(tmp_path, "bash", sbatch, "my.yaml", "seed=2", path=path, **job)
    *options, script, address, nodes = done.stdout.split()[:5]
    assert (options, address, nodes) == (["--ntasks=2", "--ntasks-per-node=1"], "10.0.0.7", "2"), done.stderr
    assert done.stdout.split()[5:] == ["my.yaml", "seed=2"]
    assert (NODES / "run_nodes.sh").samefile(script), "of the package, outside of the repository"
    (tmp_path / "deploy" / "nodes").mkdir(parents=True)
    done = run(tmp_path, "bash", sbatch, "my.yaml", path=path, **{**job, "SLURM_JOB_NODELIST": "node2"})
    assert done.stdout.split()[2:4] == ["deploy/nodes/run_nodes.sh", "10.0.0.7"], done.stderr
    assert run(tmp_path, "bash", sbatch, path=path, **job).returncode == 2
