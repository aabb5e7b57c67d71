"""The mesh as it is deployed: real `ray start`, `serve deploy`, `serve status` and `serve shutdown`, runs over REST."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import tinker
import yaml

from offbeat.deploy.run_folder import newest_checkpoint
from offbeat.deploy.token_file import TOKEN_FILE
from offbeat.services.control.client import VALIDATION_TIMEOUT_S
from offbeat.services.redis.serve_app import HEAD_NODE
from offbeat.services.redis.url_file import read_url_file
from offbeat.services.weights.transports.base import owner_of
from tests.integration.ray_cluster import RayCluster
from tests.integration.tinker_client import adapter, are_equal, create, sample, train
from tests.paths import ROOT
from tests.waiting import PATIENCE_S, wait_until_sync

pytestmark = [pytest.mark.alone, pytest.mark.timeout(600)]

DEPLOY = ROOT / "deploy" / "deploy.yaml"
SHARED_ENGINE = {
    "name": "generation-local",
    "import_path": "offbeat.deploy.cluster.apps:generation",
    "route_prefix": None,
    "args": {
        "redis_url": "redis://127.0.0.1:6390/0",
        "redis_url_file": "runs/redis/url",
        "folder": "runs/generation-local",
        "run": "one.yaml",
    },
    "deployments": [
        # The head has one CPU, which the engine takes: env workers find theirs on the node that joins.
        {"name": "generation", "ray_actor_options": {"num_cpus": 1, "resources": {HEAD_NODE: 0.001}}}
    ],
}
MY_ENVS = '''
import time
from pathlib import Path

import gymnasium

FAST = Path(__file__).with_name("fast")
COLORS = ("red", "green", "blue")


class Echo(gymnasium.Env):
    """Say the word that is shown."""

    system_prompt = "say it"
    words = ("say", "it", *COLORS)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = COLORS[int(self.np_random.integers(len(COLORS)))]
        return self.word, {}

    def step(self, action):
        time.sleep(0.0 if FAST.exists() else 4.0)
        hit = action.strip() == self.word
        return "it", float(hit), True, False, {"success": hit}
'''
MY_RUN = """
exp_name: {name}
output_dir: runs/{name}
custom_envs:
  Echo: {{env_type: "my_envs:Echo", max_steps: 1, max_tokens_per_step: 2}}
train_env_manager: {{num_env_groups: 8, group_size: 4}}
rollout_batch_size: 16
max_steps: {steps}
save_steps: 5
eval_steps: 0
final_val_batch_size: 8
sequence_length: 64
actor_infer:
  app: {app}
  generating_args: {{max_new_tokens: 2}}
  strategy_args: {{strategy_name: hf_infer}}
rollout: {{num_workers: 2, cpus_per_worker: 0.5}}
"""
STEPS = 40
GROUPS_PER_STEP = 4
TINKER = ("ServeReplica:tinker", "offbeat.trainer.tinker.process")
OURS = ("EnvWorker", "LearnerHost", "Reaper", "offbeat.trainer", "ServeReplica", "ServeController", "redis-server")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RayCluster]:
    (tmp_path / "my_envs.py").write_text(MY_ENVS)
    (tmp_path / "one.yaml").write_text(my_run("one"))
    cluster = RayCluster(tmp_path)
    yield cluster
    cluster.end()


def my_run(name: str, *, steps: int = STEPS, app: str = "null") -> str:
    return MY_RUN.format(name=name, steps=steps, app=app)


def shared_memory(cluster: RayCluster) -> list[str]:
    owners = [owner_of(name, cluster.folder / "runs" / name) for name in ("one", "two", "quickstart")]
    return [path.name for owner in owners for path in Path("/dev/shm").glob(f"offbeat-{owner}-*")]


def test_deploy_file_works_as_it_is(cluster: RayCluster):
    """The commands of its header in a new folder, with other ports; a second deployment changes nothing."""
    cluster.start(num_cpus=3)
    cluster.deploy(DEPLOY)
    wait_until_sync(lambda: set(cluster.status().values()) == {"RUNNING"}, timeout_s=120, every_s=0.5)
    token = cluster.folder / TOKEN_FILE
    assert (token.stat().st_mode & 0o777, token.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert httpx.get(f"{cluster.url}/runs", trust_env=False, timeout=PATIENCE_S).status_code == 401
    assert cluster.living(token.read_text().strip()) == []

    assert cluster.living(*TINKER) == [], "its model was not requested"
    train_by_tinker(cluster)

    overrides = ("max_steps=200", "warm_start.steps=20", "eval_steps=0", "final_val_batch_size=8", "save_steps=1000")
    assert cluster.offbeat("runs", "start", "quickstart", "--url", cluster.url, *overrides) == "quickstart\n"
    wait_until_sync(lambda: step(cluster, "quickstart") >= 2, timeout_s=240, every_s=0.2)
    before = [process.pid for process in cluster.living(*OURS)]
    cluster.deploy(DEPLOY)
    reached = step(cluster, "quickstart")
    wait_until_sync(lambda: step(cluster, "quickstart") >= reached + 3, timeout_s=120, every_s=0.2)
    assert [process.pid for process in cluster.living(*OURS)] == before
    assert httpx.get(f"{cluster.url}/runs", trust_env=False, timeout=PATIENCE_S).status_code == 401, (
        "the token is still required"
    )

    cluster.serve("shutdown", "-y")
    wait_until_sync(lambda: cluster.living(*OURS) == [], timeout_s=120, every_s=0.5)
    assert cluster.actors() == []
    assert shared_memory(cluster) == []


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_runs_survive_deployments_and_kills_and_shutdown_is_clean(cluster: RayCluster):
    cluster.start(num_cpus=1)
    cluster.join(num_cpus=1)
    tree = yaml.safe_load(DEPLOY.read_text())
    tree["applications"].append(SHARED_ENGINE)
    source = cluster.folder / "with_engine.yaml"
    source.write_text(yaml.safe_dump(tree))
    cluster.deploy(source)
    wait_until_sync(lambda: started(cluster), timeout_s=240, every_s=0.5)

    # The run has the application that it asked for, and holds it.
    wait_until_sync(lambda: step(cluster) >= 2, timeout_s=240, every_s=0.2)
    assert cluster.status() == dict.fromkeys(
        ("redis", "generation-local", "control", "tinker", "weights-one"), "RUNNING"
    )
    refused = post(cluster, my_run("two", app="generation-local"))
    assert refused.status_code == 409
    assert "'one'" in refused.json()["error"]["message"]
    unknown = post(cluster, my_run("two", app="generation-none"))
    assert (unknown.status_code, unknown.json()["error"]["problems"][0]["path"]) == (422, "actor_infer.app")
    workers = [actor for actor in cluster.actors() if actor["class_name"] == "EnvWorkerActor"]
    (head,) = [actor["node_id"] for actor in cluster.actors() if actor["class_name"].startswith("ServeReplica:redis")]
    assert len(workers) == 2
    assert head not in {worker["node_id"] for worker in workers}

    # Settings of control change in place: no process is replaced.
    mesh = ("ServeReplica", "offbeat.trainer.cli", "EnvWorker")
    before = [process.pid for process in cluster.living(*mesh)]
    tuned: dict[str, Any] = {"control.control": {"user_config": {"reconcile_s": 0.2}}}
    cluster.deploy(source, tuned)
    goes_on(cluster)
    assert [process.pid for process in cluster.living(*mesh)] == before

    # Another build is installed. Other arguments replace control and engine, and nothing else; the run and what it
    # claims stay.
    install_build(cluster)
    replaced = cluster.living("ServeReplica:control", "ServeReplica:generation")
    moved = {"control": {"log_dir": "runs/control-2"}, "generation-local": {"folder": "runs/generation-2"}}
    cluster.deploy(source, {**tuned, **moved})
    wait_until_sync(lambda: not any(each.is_running() for each in replaced), timeout_s=120, every_s=0.2)
    goes_on(cluster)
    (control,) = cluster.living("ServeReplica:control")
    (engine,) = cluster.living("ServeReplica:generation")
    after = {process.pid for process in cluster.living(*mesh)}
    assert after - {control.pid, engine.pid} == set(before) - {each.pid for each in replaced}
    assert post(cluster, my_run("two", app="generation-local")).status_code == 409

    # One env worker is of the new build while the other and the learner are still of the old one, then both are.
    first, second = sorted(cluster.living("ray::EnvWorker"), key=lambda process: process.create_time())
    for count in (1, 2):
        assert cluster.api.patch("/runs/one", json={"num_workers": count}).status_code == 200
        wait_until_sync(lambda count=count: len(cluster.living("ray::EnvWorker")) == count, timeout_s=60, every_s=1.0)
    goes_on(cluster)
    (old_worker,) = [worker for worker in (first, second) if worker.is_running()]
    (new_worker,) = [worker for worker in cluster.living("ray::EnvWorker") if worker != old_worker]
    (learner,) = cluster.living("offbeat.trainer.cli")
    builds = {path.name for path in (cluster.folder / "builds").iterdir()}
    assert {str(process.pid) for process in (control, engine, new_worker)} <= builds
    assert not {str(process.pid) for process in (learner, old_worker)} & builds
    old_worker.kill()
    control.kill()
    (cluster.folder / "fast").touch()
    wait_until_sync(lambda: cluster.run("one").get("state") == "finished", timeout_s=240, every_s=0.2)
    view = cluster.run("one")
    counters = view["counters"]
    gone = sum(counters["dropped"].values()) + sum(counters["failed"].values())
    assert view["step"] == STEPS
    assert counters["trained"] == STEPS * GROUPS_PER_STEP
    assert counters["admitted"] == counters["trained"] + gone + counters["in_flight"]

    # The password of Redis was generated, and is found by who started the mesh, but in no command line.
    password = urlsplit(read_url_file(cluster.folder / "runs/redis/url")).password
    assert password
    assert cluster.living(password) == []
    audit = cluster.offbeat("audit", "one")
    assert "PROVEN: every group" in audit

    # Its report is written when it ends, though its control replica was killed.
    folder = cluster.folder / "runs/one"
    wait_until_sync((folder / "report.json").exists, timeout_s=120, every_s=0.5)
    report = json.loads((folder / "report.json").read_text())
    assert (report["exp_name"], report["steps"]) == ("one", STEPS)
    assert report["groups_trained"] == counters["trained"]
    assert 0 < report["wall_s"] < 600
    assert (folder / "learning_curve.png").stat().st_size > 1000

    # The application is free again, and its engine the same: the next run has it at once, until Serve is shut down.
    (cluster.folder / "fast").unlink()
    two = my_run("two", app="generation-local").replace("save_steps: 5", "save_steps: 1000")
    assert post(cluster, two).status_code == 201
    wait_until_sync(lambda: step(cluster, "two") >= 2, timeout_s=240, every_s=0.2)
    reached = step(cluster, "two")
    cluster.serve("shutdown", "-y")
    wait_until_sync(lambda: cluster.living(*OURS) == [], timeout_s=240, every_s=0.5)
    assert shared_memory(cluster) == []
    assert cluster.actors() == []
    saved = newest_checkpoint(cluster.folder / "runs/two")
    assert saved is not None, "its learner saves what it has come to before Redis ends"
    assert saved[0] >= reached


def train_by_tinker(cluster: RayCluster) -> None:
    """Train and sample by the unmodified SDK; a replica that dies is replaced, and repeats what it had not saved."""
    with tinker.ServiceClient(base_url=f"{cluster.url}/tinker", api_key="tml-one") as service:
        undisturbed, client = create(service), create(service)
        losses = train(undisturbed, 6)
        assert losses[-1] < losses[0]
        assert train(client, 3) == losses[:3]
        for process in cluster.living("ServeReplica:tinker"):
            process.kill()
        assert train(client, 3) == losses[3:]
        sampler = client.save_weights_and_get_sampling_client().result()
        assert len(sample(sampler, 2).sequences) == 2
        ends = [
            adapter(cluster.folder / "runs/tinker", each.save_state("end").result().path)
            for each in (undisturbed, client)
        ]
        assert are_equal(*ends)


def install_build(cluster: RayCluster) -> None:
    """Put another build before this one on the path of processes that start from now on; each leaves its pid."""
    (cluster.folder / "builds").mkdir()
    package = cluster.folder / "offbeat"
    package.mkdir()
    for part in (ROOT / "deploy/package/offbeat").iterdir():
        if part.name not in ("__init__.py", "__pycache__"):
            (package / part.name).symlink_to(part.resolve())
    stamp = 'import os\nfrom pathlib import Path\n\n(Path(__file__).parents[1] / "builds" / str(os.getpid())).touch()\n'
    source = (ROOT / "deploy/package/offbeat/__init__.py").read_text()
    (package / "__init__.py").write_text(f'{source}\n\n__version__ = "0.9.9"\n{stamp}')


def started(cluster: RayCluster) -> bool:
    """Whether run `one` is started; it is refused for as long as the application that it shall use is not there."""
    try:
        return post(cluster, my_run("one", app="generation-local")).status_code in (200, 201)
    except httpx.HTTPError:
        return False


def post(cluster: RayCluster, document: str) -> Any:
    headers = {"content-type": "application/yaml"}
    return cluster.api.post("/runs", content=document, headers=headers, timeout=VALIDATION_TIMEOUT_S)


def step(cluster: RayCluster, run_id: str = "one") -> int:
    return cluster.run(run_id).get("step", -1)


def goes_on(cluster: RayCluster) -> None:
    """Return when run `one` has trained two more steps."""
    wait_until_sync(lambda: step(cluster) >= 0, timeout_s=60, every_s=0.2)
    reached = step(cluster)
    wait_until_sync(lambda: step(cluster) >= reached + 2, timeout_s=240, every_s=0.2)
