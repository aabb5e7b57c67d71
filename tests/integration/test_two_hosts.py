"""One run on two hosts by deploy/nodes/run_nodes.sh, as a Slurm job starts it; their link breaks meanwhile."""

import json
import secrets
import time
from pathlib import Path

import pytest

from offbeat.deploy.backup.restore import restore
from offbeat.deploy.cli.audit import examine
from offbeat.envs.frozen_lake.rows import conversations, write_rows
from tests.integration.steering import OFFBEAT
from tests.integration.two_hosts import ADDRESSES, TwoHosts, problem
from tests.paths import ROOT
from tests.waiting import wait_until_sync

pytestmark = pytest.mark.alone

STEPS, BEFORE_CUT = 150, 4
CUT_S = 3.0
RUN = """
exp_name: two
output_dir: runs/two
pipeline: sft
data: {dataset_name: runs/walks.jsonl, train_on: all}
pretrain: tiny
max_steps: 150
sequence_length: 512
rollout_batch_size: 8
rollout: {num_workers: 2, cpus_per_worker: 2}   # one on each host
save_steps: 25
"""


def steps(folder: Path) -> int:
    path = folder / "runs" / "two" / "ledger" / "steps.jsonl"
    return sum('"step"' in line for line in path.read_text().splitlines()) if path.is_file() else 0


def test_a_run_on_two_hosts_loses_nothing_when_their_link_breaks(tmp_path: Path) -> None:
    """Redis, control service and Ray's head have another address than one of the env workers."""
    if why := problem():
        pytest.skip(why)
    write_rows(tmp_path / "runs" / "walks.jsonl", conversations(64))
    (tmp_path / "two.yaml").write_text(RUN)
    command = f"{ROOT}/deploy/nodes/run_nodes.sh {ADDRESSES[0]} 2 two.yaml"
    environment = {"OFFBEAT_SECRET": secrets.token_hex(16), "RAY_START": "--num-cpus=3"}
    with TwoHosts(tmp_path) as hosts:
        head, _ = (hosts.start(host, command, environment) for host in (0, 1))
        wait_until_sync(lambda: steps(tmp_path) >= BEFORE_CUT or head.poll() is not None, timeout_s=180)
        assert head.poll() is None, hosts.log(0)
        assert hosts.reaches_head(6390)
        hosts.cut()
        assert not hosts.reaches_head(6390)
        time.sleep(CUT_S)  # how long the link is broken
        hosts.join()
        hosts.run(0, OFFBEAT, "backup", "runs/two", "-o", "live.tar", "--redis", "runs/redis/url")
        assert head.wait(timeout=180) == 0, hosts.log(0)
    folder = tmp_path / "runs" / "two"
    assert json.loads((folder / "report.json").read_text())["steps"] == STEPS
    result, evidence = examine(folder)
    assert result.proven, result.findings
    assert max(evidence.checkpoints) == STEPS
    as_of_then, _ = examine(restore(tmp_path / "live.tar", tmp_path / "restored").folder)
    assert as_of_then.proven, as_of_then.findings
    assert BEFORE_CUT <= as_of_then.lineage.last < STEPS
