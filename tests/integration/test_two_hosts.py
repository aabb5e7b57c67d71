"""A mesh over two hosts, namespaces of this machine, by the script that a Slurm or SkyPilot job runs on every node."""

import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from offbeat.benchmarks.harness.namespaces import ADDRESSES
from offbeat.deploy.components.learner_host import HEARTBEAT_TTL_S
from offbeat.deploy.run_folder import newest_checkpoint
from offbeat.services.redis.url_file import read_url_file
from tests.integration.hosts import Host, two_hosts
from tests.paths import ROOT
from tests.waiting import wait_until_sync

MARKS = ("ServeReplica:generation", "ray::EnvWorker", "offbeat.trainer.cli")
PARTITION_S = HEARTBEAT_TTL_S + 2.0
"""At least; Ray gives up a node after about 25 s."""
NODES = ROOT / "deploy" / "nodes"
RUN = """
exp_name: far
output_dir: runs/far
custom_envs:
  FrozenLake: {env_type: frozen_lake, max_steps: 2, max_tokens_per_step: 2}
train_env_manager: {num_env_groups: 8, group_size: 4}
rollout_batch_size: 16
max_steps: 2000
save_steps: 2
eval_steps: 0
final_val_batch_size: 8
sequence_length: 256
num_gpus_per_node: 1
actor_train: {num_processes: 2}
actor_infer:
  generating_args: {max_new_tokens: 2}
  strategy_args: {strategy_name: hf_infer}
rollout: {num_workers: 1, cpus_per_worker: 1.0}
weights: {transport: fs, url: s3://weights/far}
"""
STORE = {
    "AWS_ENDPOINT_URL": f"http://{ADDRESSES[1]}:5000",  # a name would be taken for a bucket's
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
}
MAKE_BUCKET = """
import sys, fsspec
fsspec.filesystem("s3").makedirs(sys.argv[1], exist_ok=True)
print("made")
"""
ASK_API = """
import sys, urllib.error, urllib.request
request = urllib.request.Request("http://127.0.0.1:8000/runs", headers={"authorization": "Bearer " + sys.argv[1]})
try:
    print(urllib.request.urlopen(request, timeout=20).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""
ASK_REDIS = """
import sys
from redis import Redis
from redis.exceptions import RedisError
try:
    print(Redis.from_url(sys.argv[1], socket_connect_timeout=5, socket_timeout=5).ping())
except RedisError as error:
    print(type(error).__name__)
"""


@pytest.mark.alone
@pytest.mark.timeout(900)
def test_a_mesh_of_two_hosts_trains_and_outlives_a_partition(tmp_path: Path):
    """The learner has a rank on each host; the engine is on one, the env worker on the other.

    Redis is on the first, and an S3 server, which the weights go through, on the second.
    """
    (tmp_path / "run.yaml").write_text(RUN)
    with two_hosts(tmp_path) as (first, second):
        second.start("moto_server", "-H", second.address, log=tmp_path / "store.out")
        wait_until_sync(lambda: ask(first, MAKE_BUCKET, "weights") == "made", every_s=0.5)
        head, _ = (start_node(host, first.address) for host in (first, second))
        folder = tmp_path / "runs/far"

        def has_saved(step: int) -> bool:
            assert head.poll() is None, (tmp_path / "first.out").read_text()
            saved = newest_checkpoint(folder)
            return saved is not None and saved[0] >= step

        wait_until_sync(lambda: has_saved(2), timeout_s=480, every_s=0.5)
        placed = {host.name: tuple(len(host.living(mark)) for mark in MARKS) for host in (first, second)}
        assert sorted(placed.values()) == [(0, 1, 1), (1, 0, 1)], placed

        url, token = read_url_file(tmp_path / "runs/redis/url"), (tmp_path / "runs/control/token").read_text().strip()
        parts = urlsplit(url)
        assert [ask(first, ASK_API, each) for each in ("", token)] == ["401", "200"]
        assert ask(second, ASK_REDIS, f"redis://{parts.hostname}:{parts.port}/0") == "AuthenticationError"
        assert ask(second, ASK_REDIS, url) == "True"

        first.cable.unplug()
        began = time.monotonic()
        while time.monotonic() < began + PARTITION_S:
            assert ask(second, ASK_REDIS, url) in ("TimeoutError", "ConnectionError")
        first.cable.plug()
        saved = newest_checkpoint(folder)
        assert saved is not None
        wait_until_sync(lambda: has_saved(saved[0] + 4), timeout_s=120, every_s=0.5)
        stopped = first.run("offbeat", "runs", "stop", "far")
        assert stopped.returncode == 0, stopped.stderr
        assert head.wait(120) == 0, (tmp_path / "first.out").read_text()
        audit = first.run(NODES / "with_redis.sh", "offbeat", "audit", "far")
        assert "PROVEN: every group" in audit.stdout, audit.stdout + audit.stderr


def start_node(host: Host, head: str) -> "subprocess.Popen[bytes]":
    return host.start(
        *(NODES / "run_nodes.sh", head, 2, "run.yaml"),
        log=host.folder / f"{host.name}.out",
        OFFBEAT_SECRET="text",
        **STORE,
        RAY_START="--num-cpus=1 --object-store-memory=100000000 --disable-usage-stats",
    )


def ask(host: Host, program: str, argument: str) -> str:
    return host.run("python", "-c", program, argument, **STORE).stdout.strip()
