"""Two Ray nodes with logical GPUs: devices of each role, a learner and its critic over both, scorers beside it, checkpoints
in S3."""

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pytest

from offbeat.trainer.training.remote_checkpoints import RemoteFolder
from tests.integration.ray_cluster import RayCluster
from tests.paths import ROOT
from tests.trainer.training.object_store import BUCKET, s3_bucket
from tests.waiting import wait_until_sync

DEPLOY = ROOT / "deploy" / "deploy.yaml"
HERE = Path(__file__).parent
SPREAD_RUN = """
exp_name: spread
output_dir: runs/spread
custom_envs:
  FrozenLake: {env_type: frozen_lake, max_steps: 2, max_tokens_per_step: 2}
train_env_manager: {num_env_groups: 8, group_size: 4}
rollout_batch_size: 16
max_steps: 400
save_steps: 2
eval_steps: 0
final_val_batch_size: 8
sequence_length: 256
num_gpus_per_node: 1
actor_train: {num_processes: 2}
actor_infer: {generating_args: {max_new_tokens: 2}}
rollout: {num_workers: 1, cpus_per_worker: 0.5}
"""
STORE = f"s3://{BUCKET}/copies"
SCORED = f"""
adv_estimator: gae
reward_normalization: {{method: identity}}
use_kl_loss: true
kl_loss_coef: 0.05
reference: {{strategy_args: {{placement: service, num_replicas: 2}}}}
buffer: {{worker_timeout_s: 4}}
checkpoint_config: {{output_dir: "{STORE}", keep_local_file: false}}
"""
SCORED_RUN = SCORED + SPREAD_RUN.replace("actor_train: {num_processes: 2}", "critic: {num_processes: 1}").replace(
    "max_new_tokens: 2}}", "max_new_tokens: 2}, strategy_args: {strategy_name: hf_infer}}"
)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RayCluster]:
    cluster = RayCluster(tmp_path)
    yield cluster
    cluster.end()


def check_against(cluster: RayCluster) -> None:
    """Assert that `config validate` reports placement problems with the cluster's numbers, which this machine has not."""
    (cluster.folder / "run.yaml").write_text(SPREAD_RUN)
    check = ("config", "validate", "run.yaml", "--address", cluster.address)
    devices = ("actor_train.device=cuda", "actor_infer.device=cuda", "num_gpus_per_node=2")
    four = "actor_train.num_processes=4"
    assert cluster.offbeat(*check, *devices, four) == "valid\n"
    refused = cluster.refusal("offbeat", *check, *devices, four, "actor_train.device_mapping=[0,1,2,4]")
    assert "actor_train.device_mapping: device 4 does not exist: there are 4 device(s) (2 + 2 on 2 nodes)" in refused
    refused = cluster.refusal("offbeat", *check, *devices, "actor_train.num_processes=5")
    assert "5 process(es) need a device each, there are 4 device(s)" in refused
    refused = cluster.refusal("offbeat", *check, "rollout.num_workers=9")
    assert "the cluster has 3: take rollout.num_workers <= " in refused


@pytest.mark.alone
@pytest.mark.timeout(600)
def test_roles_get_exactly_their_devices(cluster: RayCluster, redis_url: str) -> None:
    """Device 1 is shared by an engine and the learner, device 3 is the learner's alone, device 5 the critic's."""
    cluster.start(num_cpus=2, num_gpus=3)
    cluster.join(num_cpus=1, num_gpus=3)  # nodes of one address: their order is by a random id
    cluster.python(HERE / "cluster_devices.py", str(cluster.folder), redis_url)
    check_against(cluster)
    found: dict[str, Any] = json.loads((cluster.folder / "devices.json").read_text())
    first, second = found["nodes"]
    assert sorted(map(tuple, found["engines"])) == sorted([(first, "0"), (first, "1"), (second, "1")])
    assert found["ranks"]["0"] == {"CUDA_VISIBLE_DEVICES": "1", "OFFBEAT_RANKS_PER_NODE": "1,1+1"}
    for rank in (1, 2):
        assert found["ranks"][str(rank)] == {
            "CUDA_VISIBLE_DEVICES": "0,2",
            "OFFBEAT_RANKS_PER_NODE": "1,1+1",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank - 1),
            "WORLD_SIZE": "3",
        }
    assert found["free"] == 1


def ranks(cluster: RayCluster) -> dict[str, psutil.Process]:
    """Processes of the learner by rank."""
    found: dict[str, psutil.Process] = {}
    for process in cluster.living("offbeat.trainer.cli"):
        try:
            found[process.environ().get("RANK", "0")] = process
        except psutil.Error:
            continue
    return found


def host_of(cluster: RayCluster, kind: str) -> str:
    return next((actor["node_id"] for actor in cluster.actors() if actor["class_name"] == kind), "")


def post(cluster: RayCluster, document: str) -> None:
    posted = cluster.api.post("/runs", content=document, headers={"content-type": "application/yaml"})
    assert posted.status_code == 201, posted.text


def step(cluster: RayCluster, run: str = "spread") -> int:
    return cluster.run(run).get("step", -1)


def wait_for_steps(cluster: RayCluster, number: int) -> None:
    """Return when run `spread` has trained `number` more steps."""
    reached = step(cluster)
    wait_until_sync(lambda: step(cluster) >= reached + number, timeout_s=120, every_s=0.3)


@pytest.fixture
def s3() -> Iterator[None]:
    with s3_bucket():
        yield


@pytest.mark.alone
@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("s3")  # before the cluster, which takes the environment
def test_a_learner_of_two_nodes_dies_and_returns_as_one(request: pytest.FixtureRequest) -> None:
    """Rank 1 is the critic, beside a reference of two replicas; an attached learner of two policy ranks and a critic resumes
    from the store what the folder lost."""
    cluster: RayCluster = request.getfixturevalue("cluster")
    cluster.start(num_cpus=3)
    cluster.join(num_cpus=1)
    cluster.deploy(DEPLOY)
    wait_until_sync(lambda: cluster.status().get("control") == "RUNNING", timeout_s=120, every_s=0.5)
    post(cluster, SCORED_RUN)
    wait_until_sync(lambda: step(cluster) >= 3, timeout_s=240, every_s=0.3)
    before = ranks(cluster)
    assert before.keys() == {"0", "1"}
    assert host_of(cluster, "LearnerHostActor") != host_of(cluster, "FollowerHostActor") != ""

    first, second = cluster.living("ray::ScorerActor")
    for stopped in (first, second):  # the other one scores what this one holds, too
        stopped.suspend()
        wait_for_steps(cluster, 4)
        stopped.resume()
    first.kill()
    before["1"].send_signal(signal.SIGKILL)
    wait_until_sync(lambda: not before["0"].is_running(), timeout_s=60, every_s=0.2)

    def is_back() -> bool:
        after = ranks(cluster)
        return after.keys() == {"0", "1"} and not {p.pid for p in after.values()} & {p.pid for p in before.values()}

    wait_until_sync(is_back, timeout_s=120, every_s=0.2)
    wait_until_sync(lambda: len(cluster.living("ray::ScorerActor")) == 2, timeout_s=60, every_s=0.2)
    wait_for_steps(cluster, 2)
    assert cluster.api.post("/runs/spread/stop").status_code in (200, 202)
    wait_until_sync(lambda: cluster.run("spread").get("state") == "stopped", timeout_s=60, every_s=0.3)
    wait_until_sync(lambda: not cluster.living("offbeat.trainer.cli", "ray::ScorerActor"), timeout_s=30, every_s=0.2)
    resume_elsewhere(cluster, step(cluster))


def resume_elsewhere(cluster: RayCluster, reached: int) -> None:
    """Resume from the store alone, by two attached ranks, and upload."""
    (written,) = fsspec.filesystem("s3").ls(STORE)
    uploaded = RemoteFolder(f"s3://{written}").read_list()
    assert uploaded[-1].step == reached
    shutil.rmtree(cluster.folder / "runs" / "spread")
    end = reached + 4
    replaced = {"exp_name: spread": "exp_name: again", "runs/spread": "runs/again", "num_gpus_per_node: 1": ""}
    document = SCORED_RUN.replace("max_steps: 400", f"max_steps: {end}")
    for old, new in replaced.items():
        document = document.replace(old, new)
    post(cluster, f'{document}\ncontrol: {{learner: external}}\nresume_from_checkpoint: "{STORE}"')
    said = cluster.offbeat("learner", "attach", "again", "--redis", "runs/redis/url", "--nproc", "2")
    assert "Learner of again: 3 process(es)" in said
    assert f"Resuming from step {reached}" in said
    assert f"step {end}/{end}" in said
    wait_until_sync(lambda: cluster.run("again").get("state") == "finished", timeout_s=60, every_s=0.2)
    (other,) = [each for each in fsspec.filesystem("s3").ls(STORE) if each != written]
    assert RemoteFolder(f"s3://{other}").read_list()[-1].step == end
    assert RemoteFolder(f"s3://{written}").read_list() == uploaded, "the first run's are untouched"
    assert "PROVEN: every group" in cluster.offbeat("audit", "again")
