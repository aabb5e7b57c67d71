"""Data pipelines on the deployed mesh: started over REST, controlled and shown by `offbeat runs`, proven and reproduced."""

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

from offbeat.deploy.report.report import read_report
from offbeat.envs.dataset.arithmetic import write_problems
from offbeat.envs.frozen_lake.rows import conversations, pairs, write_rows
from offbeat.services.chat.vision import encode_png
from offbeat.trainer.config.run import LearnerRunConfig
from offbeat.trainer.training.batch_log import BatchLog
from tests.integration.data_run import write_teacher
from tests.integration.ray_cluster import RayCluster
from tests.integration.test_deploy import DEPLOY
from tests.paths import CONFIGS
from tests.services.reward.judge_models import Lesson, write_judge
from tests.waiting import wait_until_sync

pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]

SHORT_ONLINE: dict[str, Any] = {"max_steps": 4, "zero_variance": "train", "eval_steps": 0, "save_steps": 2}
POLICY_LOSS = ("adv_estimator", "reward_normalization", "pg_variant", "pg_clip", "entropy_loss_coef")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    cluster = RayCluster(tmp_path_factory.mktemp("mesh"))
    for name, seed in (("rows.jsonl", 0), ("val.jsonl", 1)):
        write_rows(cluster.folder / "sft" / name, conversations(20, seed))
        for pipeline in ("dpo", "reward_model"):
            write_rows(cluster.folder / pipeline / name, pairs(20, seed))
        write_rows(cluster.folder / "distill" / name, conversations(20, seed))
    cluster.start(num_cpus=2)
    cluster.deploy(DEPLOY)
    wait_until_sync(lambda: set(cluster.status().values()) == {"RUNNING"}, timeout_s=240, every_s=0.5)
    yield cluster
    cluster.end()


def document(pipeline: str, *lines: str) -> str:
    """The packaged configuration, with our files and sizes."""
    text = (CONFIGS / f"{pipeline}.yaml").read_text()
    for name, file in (("dataset_name", "rows"), ("val_dataset_name", "val")):
        text = re.sub(rf"^  {name}: \S+", f"  {name}: {pipeline}/{file}.jsonl", text, flags=re.MULTILINE)
    text = re.sub(r"^  num_train_epochs: .*$", "", text, flags=re.MULTILINE)
    for key in ("rollout_batch_size", "eval_steps", "save_steps", r"tiny:\n  num_hidden_layers"):
        text = re.sub(rf"^{key}: .*$", "", text, flags=re.MULTILINE)
    return "\n".join([text, "tiny: {num_hidden_layers: 1}", "rollout_batch_size: 8", "record_batches: 1000", *lines])


def post(cluster: RayCluster, text: str, **options: Any) -> httpx.Response:
    return cluster.api.post("/runs", content=text, headers={"content-type": "application/yaml"}, **options)


def step(cluster: RayCluster, run: str) -> int:
    return cluster.run(run).get("step", -1)


def state(cluster: RayCluster, run: str) -> str:
    return cluster.run(run).get("state", "")


def proven_and_reported(cluster: RayCluster, run: str, steps: int) -> dict[str, Any]:
    """The report of a run that is over."""
    folder = cluster.folder / "runs" / run
    assert "PROVEN: every group" in cluster.offbeat("audit", run)
    wait_until_sync(lambda: read_report(folder).get("steps") == steps, timeout_s=120, every_s=0.5)
    report = read_report(folder)
    assert report["pipeline"] == run
    losses = [evaluation["loss"] for evaluation in report["evaluations"] if evaluation["sampling"] == "loss"]
    assert losses[-1] < losses[0]
    assert (folder / "learning_curve.png").stat().st_size > 1000
    return report


def test_a_file_that_can_not_be_trained_is_refused_over_rest(cluster: RayCluster) -> None:
    text = document("sft", "max_steps: 5").replace("sft/rows.jsonl", "dpo/rows.jsonl")
    refused = post(cluster, text, params={"dry_run": "true"})
    (problem,) = refused.json()["error"]["problems"]
    assert (refused.status_code, problem["path"]) == (422, "data.dataset_name")
    assert "neither the column 'messages'" in problem["message"]
    valid = post(cluster, document("sft", "max_steps: 5"), params={"dry_run": "true"})
    assert (valid.status_code, valid.json()) == (200, None)


def test_rlvr_is_valid_over_rest_and_foreign_code_in_its_rewards_is_named(cluster: RayCluster) -> None:
    for name, held_out in (("rows", False), ("rows_val", True)):
        write_problems(cluster.folder / "rlvr" / f"{name}.jsonl", held_out=held_out)
    text = re.sub(r"runs/data/arithmetic(_val)?\.jsonl", r"rlvr/rows\1.jsonl", (CONFIGS / "rlvr.yaml").read_text())
    valid = post(cluster, text, params={"dry_run": "true"})
    assert (valid.status_code, valid.json()) == (200, None), valid.text
    broken = text.replace("kind: math_rule", "kind: function, path: 'no_such_module:score'")
    refused = post(cluster, broken, params={"dry_run": "true"})
    (problem,) = refused.json()["error"]["problems"]
    assert (refused.status_code, problem["path"]) == (422, "rewards.0")
    assert "no_such_module" in problem["message"]


def colours(number: int) -> Iterator[dict[str, Any]]:
    """Squares that are red or blue, as data URLs; one in five is too large for `prompt_length`."""
    for n in range(number):
        side = 256 if n % 5 == 4 else 32
        png = encode_png(np.full((side, side, 3), ((200, 20, 20), (20, 20, 200))[n % 2], dtype=np.uint8))
        url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        truth = ("red", "blue")[n % 2]
        yield {
            "prompt": "which colour",
            "images": [url],
            "ground_truth": truth,
            "tag": ("addition", "mixed")[n // 2 % 2],
        }


def judged(folder: Path) -> dict[str, Any]:
    """A judge of the mesh that gives every answer 7 points of 10."""
    write_judge(folder, [Lesson("which colour " + "<unk> " * number, "Score: 7") for number in (0, 10, 40, 80, 120)])
    return {
        "name": "judge",
        "kind": "llm_judge",
        "model_args": {"model_name_or_path": str(folder)},
        "kv_cache_gib": 0.25,
        "strategy_args": {"strategy_config": {"max_model_len": 512}},
        "cpus_per_replica": 0.25,
        "weight": 0.1,
    }


@pytest.mark.nightly
def test_online_pairs_of_answers_survive_the_kills_of_judge_and_learner(cluster: RayCluster) -> None:
    """Prompts with images over REST, scored by a rule and a judge of the mesh, paired best against worst."""
    for name, number in (("rows", 100), ("few", 10)):
        write_rows(cluster.folder / "rlvr" / f"{name}.jsonl", colours(number))
    tree = yaml.safe_load((CONFIGS / "rlvr.yaml").read_text())
    tree |= {"pipeline": "online_dpo", "exp_name": "pairs", "output_dir": "runs/pairs", "record_batches": 100}
    tree["data"] |= {"dataset_name": "rlvr/rows.jsonl", "val_dataset_name": "rlvr/few.jsonl"}
    tree["tiny"] |= {"num_hidden_layers": 1, "vision": {"depth": 1}}
    tree["rewards"] = [{"name": "answer", "kind": "regex", "pattern": "red|blue"}, judged(cluster.folder / "judge")]
    for key in ("max_refill_ratio", "warm_start", *POLICY_LOSS):
        del tree[key]
    started = post(cluster, yaml.safe_dump(tree | SHORT_ONLINE))
    assert started.status_code == 201, started.text
    wait_until_sync(lambda: step(cluster, "pairs") >= 1, timeout_s=240, every_s=0.2)
    for name in ("ServeReplica:reward-pairs:judge", "offbeat.trainer.cli"):
        (process,) = cluster.living(name)
        process.kill()
    wait_until_sync(lambda: state(cluster, "pairs") == "finished", timeout_s=240, every_s=0.2)
    counters, steps = cluster.run("pairs")["counters"], SHORT_ONLINE["max_steps"]
    assert (counters["trained"], counters["failed"], counters["in_flight"]) == (8 * steps, {}, 0)
    assert counters["dropped"].get("too_long", 0) > 0, "the tokens of an image count"
    audit = json.loads(cluster.offbeat("audit", "pairs", "--json"))
    assert (audit["proven"], audit["learners"]) == (True, 2), audit
    folder = cluster.folder / "runs" / "pairs"
    groups = [g for n in range(1, steps + 1) for g in BatchLog(folder).read(n, LearnerRunConfig()).batch.groups]
    assert len({group.group_id for group in groups}) == len(groups) == 8 * steps
    for each in (trajectory for group in groups for trajectory in group.trajectories):
        assert each.metrics["reward/judge"] == pytest.approx(0.7)
        assert each.reward == pytest.approx(each.metrics["reward/answer"] + 0.07)
        assert len(each.segments[0].images) == 1
    path, plain = f"/runs/pairs/trajectories/{groups[-1].number}/0", {"accept": "application/json"}
    trajectory = cluster.api.get(path, headers=plain).json()
    assert trajectory["segments"][0]["images"], trajectory
    wait_until_sync(lambda: not cluster.living("ServeReplica:reward-pairs:judge"), timeout_s=60, every_s=0.2)


def test_sft_is_paused_changed_stopped_and_resumed_over_rest(cluster: RayCluster) -> None:
    text = document("sft", "max_steps: 4000", "save_steps: 1000", "eval_steps: 1000")
    started = post(cluster, text)
    assert started.status_code == 201, started.text
    wait_until_sync(lambda: step(cluster, "sft") >= 5, timeout_s=240, every_s=0.2)
    view = cluster.run("sft")
    assert set(view["components"]) == {"learner", "env-workers"}, "no engine and no broker"
    assert {"loss", "tokens_trained"} <= set(view["metrics"])
    assert "loss" in cluster.offbeat("runs", "list", "--url", cluster.url)
    shown = cluster.offbeat("runs", "show", "sft", "--url", cluster.url)
    assert re.search(r"newest step +loss \d", shown), shown
    assert "Traceback" not in cluster.offbeat("runs", "why", "sft", "--url", cluster.url)

    cluster.offbeat("runs", "pause", "sft", "--url", cluster.url)
    wait_until_sync(lambda: state(cluster, "sft") == "paused", timeout_s=60, every_s=0.2)
    assert "The run is paused" in cluster.offbeat("runs", "why", "sft", "--url", cluster.url)
    cluster.offbeat("runs", "resume", "sft", "--url", cluster.url)
    reached = step(cluster, "sft")
    wait_until_sync(lambda: step(cluster, "sft") >= reached + 5, timeout_s=120, every_s=0.2)

    cluster.offbeat("runs", "set", "sft", "learning_rate=0.0005", "--url", cluster.url)
    wait_until_sync(lambda: adopted(cluster, "sft"), timeout_s=60, every_s=0.2)
    for name, value, reason in (("temperature", 0.5, "samples no rows"), ("num_replicas", 2, "samples nothing")):
        refused = cluster.api.patch("/runs/sft", json={name: value})
        assert refused.status_code == 422
        assert reason in refused.json()["error"]["problems"][0]["message"]

    cluster.offbeat("runs", "stop", "sft", "--url", cluster.url)
    wait_until_sync(lambda: state(cluster, "sft") == "stopped", timeout_s=120, every_s=0.2)
    reached = step(cluster, "sft")
    assert reached > 5
    resumed = text.replace("max_steps: 4000", f"max_steps: {reached + 10}")
    assert post(cluster, resumed + "\nresume_from_checkpoint: true").status_code == 201
    wait_until_sync(lambda: state(cluster, "sft") == "finished", timeout_s=240, every_s=0.2)
    counters = cluster.run("sft")["counters"]
    assert (counters["trained"], counters["in_flight"]) == (8 * (reached + 10), 0)
    proven_and_reported(cluster, "sft", reached + 10)
    watched = cluster.offbeat("runs", "watch", "sft", "--url", cluster.url)
    assert re.search(r"loss 0\.\d+, validation \d\.\d+", watched), watched


def health(cluster: RayCluster, run: str, component: str) -> str:
    return cluster.run(run).get("components", {}).get(component, {}).get("health", "")


def adopted(cluster: RayCluster, run: str) -> bool:
    changes = cluster.run(run).get("changes", [])
    return bool(changes) and changes[-1]["from_step"] is not None


@pytest.mark.nightly
@pytest.mark.parametrize("pipeline", ["distill", "reward_model"])
def test_a_pipeline_is_started_over_rest_and_proven(cluster: RayCluster, pipeline: str) -> None:
    text = document(pipeline, "max_steps: 4", "save_steps: 4", "eval_steps: 4")
    if pipeline == "distill":
        teacher = write_teacher(cluster.folder / "teacher", cluster.folder / "distill" / "rows.jsonl")
        text = text.replace("runs/quickstart/checkpoints/step-000160", str(teacher))
    started = post(cluster, text)
    assert started.status_code == 201, started.text
    wait_until_sync(lambda: state(cluster, pipeline) == "finished", timeout_s=240, every_s=0.2)
    assert proven_and_reported(cluster, pipeline, 4)["groups_trained"] == {"distill": 32, "reward_model": 16}[pipeline]


def test_dpo_is_trained_by_an_attached_learner_and_reproduced(cluster: RayCluster) -> None:
    path = cluster.folder / "pairs.yaml"
    path.write_text(document("dpo", "max_steps: 12", "save_steps: 4", "eval_steps: 4", "control: {learner: external}"))
    assert cluster.offbeat("runs", "start", str(path), "--url", cluster.url) == "dpo\n"
    wait_until_sync(lambda: health(cluster, "dpo", "env-workers") == "ready", timeout_s=120, every_s=0.2)
    assert "learner" in cluster.offbeat("runs", "why", "dpo", "--url", cluster.url)
    said = cluster.offbeat("learner", "attach", "dpo", "--redis", "runs/redis/url")
    assert re.search(r"step 12/12  loss 0\.\d+  accuracy ", said), said
    wait_until_sync(lambda: state(cluster, "dpo") == "finished", timeout_s=60, every_s=0.2)
    report = proven_and_reported(cluster, "dpo", 12)
    assert report["groups_trained"] == 48
    reproduced = json.loads(cluster.offbeat("learner", "reproduce", "dpo", "--json"))
    assert reproduced["compared"]
    assert all(weights["equal"] for weights in reproduced["compared"])
    step_ten = cluster.offbeat("learner", "reproduce", "dpo", "--step", "10")
    assert "step 10: 4 groups" in step_ten
    assert "no trajectories with ratios and advantages" in step_ten
    cluster.offbeat("runs", "delete", "dpo", "--files", "--url", cluster.url)
    assert not (cluster.folder / "runs" / "dpo" / "config.yaml").exists()
