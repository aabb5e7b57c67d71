"""Two runs with adapters on one generation application, started over REST: real engine, learners and env workers."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from offbeat.deploy.config.loader import read_document
from offbeat.services.control.client import VALIDATION_TIMEOUT_S
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.training.batch_log import BatchLog
from tests.integration.ray_cluster import RayCluster
from tests.integration.test_recorded_logprobs import compare_run, logprobs, versioned_turns
from tests.paths import ROOT
from tests.waiting import wait_until_sync

pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]

APP = "generation-shared"
ENGINE = "ServeReplica:generation"
ENVS = '''
import time
from pathlib import Path

import gymnasium

FAST = Path(__file__).with_name("fast")
WORDS = ("red", "green", "blue")


class Talk(gymnasium.Env):
    """Any answer is rewarded, some more than others."""

    system_prompt = "say it"
    words = ("say", "it", *WORDS)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return WORDS[int(self.np_random.integers(len(WORDS)))], {}

    def step(self, action):
        time.sleep(0.0 if FAST.exists() else 6.0)
        return "it", len(action) % 5 / 4, True, False, {"success": False}
'''
RUN = """
exp_name: {name}
output_dir: runs/{name}
seed: {seed}
custom_envs:
  Talk: {{env_type: "shared_envs:Talk", max_steps: 1, max_tokens_per_step: 8}}
train_env_manager: {{num_env_groups: 4, group_size: 4}}
rollout_batch_size: 8
max_steps: {steps}
save_steps: 1
max_ckpt_to_keep: 1000
record_batches: 1000
zero_variance: train
eval_steps: 0
final_val_batch_size: 8
sequence_length: 64
resume_from_checkpoint: {resume}
actor_train:
  model_args: {{lora_target: {target}, lora_rank: {rank}}}
  training_args: {{learning_rate: 0.02}}
actor_infer:
  app: {app}
  kv_cache_gib: 0.25
  generating_args: {{max_new_tokens: 8}}
  strategy_args: {{strategy_config: {{max_lora_rank: {max_rank}}}}}
rollout: {{num_workers: 1, cpus_per_worker: 0.5}}
"""
STEPS = {"one": 40, "two": 70}


def document(name: str, **changes: Any) -> str:
    values = {
        "seed": 1,
        "steps": STEPS.get(name, 5),
        "resume": "false",
        "target": "all-linear",
        "rank": 4,
        "max_rank": 4,
    }
    return RUN.format(name=name, **({"app": APP} | values | changes))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RayCluster]:
    (tmp_path / "shared_envs.py").write_text(ENVS)
    (tmp_path / "shared.yaml").write_text(document("shared", app="null"))
    cluster = RayCluster(tmp_path)
    yield cluster
    cluster.end()


def deploy(cluster: RayCluster, num_replicas: int = 1) -> None:
    tree = yaml.safe_load((ROOT / "deploy" / "deploy.yaml").read_text())
    redis = next(app["args"] for app in tree["applications"] if app["name"] == "redis")
    engines = {
        "name": APP,
        "import_path": "offbeat.deploy.cluster.apps:generation",
        "route_prefix": None,
        "args": {
            "redis_url": redis["redis_url"],
            "redis_url_file": redis["redis_url_file"],
            "folder": f"runs/{APP}",
            "run": "shared.yaml",
            "config": {"actor_infer": {"max_loras": 2}},
        },
        "deployments": [{"name": "generation", "num_replicas": num_replicas}],
    }
    tree["applications"] = [*(app for app in tree["applications"] if app["name"] in ("redis", "control")), engines]
    source = cluster.folder / "source.yaml"
    source.write_text(yaml.safe_dump(tree))
    cluster.deploy(source)
    wait_until_sync(lambda: len(cluster.living(ENGINE)) == num_replicas, timeout_s=300, every_s=1.0)
    wait_until_sync(lambda: set(cluster.status().values()) == {"RUNNING"}, timeout_s=300, every_s=1.0)


def post(cluster: RayCluster, text: str) -> tuple[int, str]:
    headers = {"Content-Type": "application/yaml"}
    answer = cluster.api.post("/runs", content=text, headers=headers, timeout=VALIDATION_TIMEOUT_S)
    if answer.status_code < 400:
        return answer.status_code, ""
    error = answer.json()["error"]
    return answer.status_code, " ".join([error["message"], *(each["message"] for each in error.get("problems") or ())])


def step(cluster: RayCluster, run_id: str) -> int:
    return cluster.run(run_id).get("step", -1)


def wait_for_steps(cluster: RayCluster, **steps: int) -> None:
    wait_until_sync(
        lambda: all(step(cluster, name) >= each for name, each in steps.items()), timeout_s=400, every_s=0.5
    )


def generation_of(cluster: RayCluster, run_id: str) -> str:
    return cluster.run(run_id)["components"]["generation"]["detail"]


def test_two_runs_share_an_application_and_record_their_own_versions_logprobs(cluster: RayCluster) -> None:
    """What does not fit is refused; the replica is killed, another one is added, one run is stopped and resumed, and the
    other one continues.
    """
    cluster.start(num_cpus=4)
    deploy(cluster)
    assert post(cluster, document("one", app="null")) == (201, "")
    assert post(cluster, document("two", rank=2, target="'q_proj,v_proj'")) == (201, "")

    for name in STEPS:  # until both have started
        assert cluster.api.post(f"/runs/{name}/pause").status_code == httpx.codes.ACCEPTED
    full = (
        document("three").replace("{lora_target: all-linear, lora_rank: 4}", "{}").replace("{max_lora_rank: 4}", "{}")
    )
    for text, status, reason in (
        (document("three"), 409, "has 2 adapter slots, all in use by run 'one'"),
        (document("three", seed=2), 409, "whose adapters are on another base"),
        (document("three", max_rank=8, rank=8), 422, "its max_lora_rank is 4, the run's is 8: take up to 4"),
        (document("three", target="'q_proj,head'"), 422, "the model has no layer head: take of down_proj, "),
        (full, 422, "its engines take adapters alone; set actor_train.model_args.lora_target"),
    ):
        answer = post(cluster, text)
        assert answer[0] == status, answer
        assert reason in answer[1]

    for name in STEPS:
        wait_until_sync(lambda name=name: cluster.run(name).get("state") == "paused", timeout_s=300, every_s=0.5)
        assert cluster.api.post(f"/runs/{name}/resume").status_code == httpx.codes.ACCEPTED
    wait_for_steps(cluster, one=2, two=2)
    assert [generation_of(cluster, name) for name in STEPS] == [
        f"application {APP}, with {name}" for name in ("two", "one")
    ]
    (engine,) = cluster.living(ENGINE)
    engine.kill()
    reached = {name: step(cluster, name) for name in ("one", "two")}
    wait_for_steps(cluster, **{name: each + 4 for name, each in reached.items()})
    logs = set((cluster.folder / "runs" / APP / "logs").iterdir())
    deploy(cluster, num_replicas=2)
    (added,) = {*(cluster.folder / "runs" / APP / "logs").iterdir()} - logs
    assert set(re.findall(r"serves run (\w+)", added.read_text())) == {"one", "two"}, "before Serve calls it ready"
    wait_for_steps(cluster, **{name: step(cluster, name) + 2 for name in STEPS})

    assert cluster.api.post("/runs/one/stop").status_code == httpx.codes.ACCEPTED
    wait_until_sync(lambda: cluster.run("one").get("state") == "stopped", timeout_s=120, every_s=0.5)
    stopped_at, restarts = step(cluster, "one"), cluster.run("two")["components"]["generation"]["restarts"]
    wait_for_steps(cluster, two=step(cluster, "two") + 2)
    assert generation_of(cluster, "two") == f"application {APP}"
    assert post(cluster, document("one", resume="true")) == (201, "")
    wait_for_steps(cluster, one=stopped_at + 2)
    assert generation_of(cluster, "two") in (f"application {APP}, with one", f"application {APP}")
    last = {name: step(cluster, name) + 4 for name in STEPS}
    (cluster.folder / "fast").touch()
    for name, steps in STEPS.items():
        wait_until_sync(lambda name=name: cluster.run(name).get("state") == "finished", timeout_s=300, every_s=0.5)
        assert step(cluster, name) == steps
    assert cluster.run("two")["components"]["generation"]["restarts"] == restarts == 0

    folders = {name: cluster.folder / "runs" / name for name in STEPS}
    for name, steps in last.items():  # the steps that follow are of two undisturbed runs
        assert "PROVEN: every group" in cluster.offbeat("audit", name)
        config = read_document((folders[name] / "config.yaml").read_text(), working_dir=cluster.folder)
        save_first_version(folders[name])
        compared = compare_run(folders[name], config, steps)
        assert compared.tokens > 20 * steps
        assert len(compared.versions) > steps / 2
    assert differs_from(folders["one"], folders["two"], last["one"], cluster.folder)
    cluster.serve("shutdown", "-y")


def save_first_version(run: Path) -> None:
    """Write version 0, whose adapters change nothing, beside the checkpoints."""
    base = load_policy(run / "policy", ModelArgs(), seed=1).model
    base.save_pretrained(run / "checkpoints" / "step-000000")


def differs_from(run: Path, other: Path, last: int, working_dir: Path) -> bool:
    """Return whether a run's logprobs are not those of the other run's adapter of the same version."""
    config = read_document((run / "config.yaml").read_text(), working_dir=working_dir)
    batch = BatchLog(run).read(last, config).batch
    turns = [turn for group in batch.groups for each in group.trajectories for turn in versioned_turns(each)]
    turn = turns[0]
    checkpoint = other / "checkpoints" / f"step-{turn.version:06d}"
    (expected,) = logprobs(AutoModelForCausalLM.from_pretrained(checkpoint).eval(), [turn.segment])
    recorded = torch.tensor(turn.segment.logprobs[turn.start : turn.end])
    return bool((expected[turn.start : turn.end] - recorded).abs().max() > 0.01)
