"""Consecutive asynchronous runs on one engine, without Ray and the control service."""

# pyright: basic
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from offbeat.benchmarks.harness.environment import BenchEnvironment, bench_environment
from offbeat.benchmarks.harness.learner import BenchLearner, learner_config
from offbeat.benchmarks.harness.rollout_process import PolicySpec, RolloutProcess
from offbeat.deploy.config.loader import load_run
from offbeat.deploy.config.run import RunConfig
from offbeat.services.telemetry import MetricRecord
from offbeat.services.weights.transports.factory import cleanup
from offbeat.trainer.engines.process_group import Ranks, process_group, ranks_of_environment
from offbeat.trainer.learner.evaluations import RECORDED, Evaluation, RedisEvaluationLog
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.policy_trainer import PolicyTrainer

BEFORE_FILE = "before.json"
"""Initial success."""
SAMPLINGS = ("sampled", "greedy")


class SharedEngine:
    def __init__(self, base: BenchEnvironment, rollouts: RolloutProcess, ranks: Ranks, policy: Path) -> None:
        self._bench_env = base
        self._rollouts = rollouts
        self._ranks = ranks
        self._policy = policy

    def run(self, file: Path, overrides: list[str], folder: Path, timeout_s: float) -> dict[str, Any]:
        config = load_run(file, overrides).model_copy(update={"output_dir": folder})
        began, load = time.monotonic(), _load()
        torch.manual_seed(config.seed)
        epoch = self._bench_env.prepare(config)
        learner = self._learner(config, epoch, began + timeout_s)
        self._rollouts.start_run(self._bench_env.worker_settings(config))
        try:
            steps = learner.run()
        finally:
            try:
                self._rollouts.stop()
            finally:
                cleanup(config.exp_name, config.weights, folder)
        (folder / "steps.jsonl").write_text("".join(json.dumps(_plain(record)) + "\n" for record in steps))
        if not any(record.labels.get("when") == "after" for record in learner.records.evaluations):
            raise TimeoutError(f"not over after {timeout_s:g} s: {len(steps)} of {config.max_steps} steps")
        result = {
            "steps": len(steps),
            "eval_episodes": config.final_val_batch_size,
            **summarize_steps([_plain(record) for record in steps]),
        }
        result |= self._before() | _successes(learner.records.evaluations, "after")
        return result | {"wall_s": time.monotonic() - began, "load": [load, _load()]}

    def _learner(self, config: RunConfig, epoch: int, ends_at: float) -> BenchLearner:
        read = learner_config(config, evaluates=True)
        trainer = PolicyTrainer(LearnerRun(config.exp_name, config.exp_name, config.output_dir, read), self._ranks)
        trainer.begin(lambda *_: None, lambda: False)
        if (self._policy / BEFORE_FILE).exists():
            log = RedisEvaluationLog(self._bench_env.redis, config.exp_name)
            for sampling in SAMPLINGS:
                log.put(Evaluation("before", sampling, 0, 0).eval_id, RECORDED)

        learner = BenchLearner(
            self._bench_env, config, epoch, trainer, lambda _: None, check=self._rollouts.check, evaluates=True,
            order=config.buffer.order, ends_at=ends_at,
        )  # fmt: skip
        self._evaluations = learner.records.evaluations
        return learner

    def _before(self) -> dict[str, float]:
        path = self._policy / BEFORE_FILE
        if not path.exists():
            path.write_text(json.dumps(_successes(self._evaluations, "before")))
        return json.loads(path.read_text())


def summarize_steps(values: list[dict[str, float]]) -> dict[str, float]:
    """Return means over steps that trained the policy."""
    trained = [step for step in values if "actor/mismatch_kl" in step]
    names = {"lag": "staleness", "mismatch_kl": "actor/mismatch_kl", "ess": "actor/ess"}
    means = {key: mean(step[name] for step in trained if name in step) for key, name in names.items()}
    return means | {"lag_max": max(step["staleness_max"] for step in values)}


def _plain(record: MetricRecord) -> dict[str, float]:
    return {"step": record.step or 0, **{name: partial.value for name, partial in record.values.items()}}


def _successes(records: list[MetricRecord], when: str) -> dict[str, float]:
    successes = {
        record.labels["sampling"]: record.values["success"].value for record in records if record.labels["when"] == when
    }
    return {f"success_{when}": successes["sampled"], f"greedy_{when}": successes["greedy"]}


def _load() -> float:
    return float(Path("/proc/loadavg").read_text().split()[0])


@contextmanager
def shared_engine(file: Path, overrides: list[str], policy: Path) -> Iterator[SharedEngine]:
    config = load_run(file, overrides)
    torch.set_num_threads(config.actor_train.num_threads)
    spec = PolicySpec("vllm", config=config.actor_infer)
    ranks = ranks_of_environment("cpu")
    with (
        bench_environment() as base,
        RolloutProcess(spec, policy, sequence_length=config.sequence_length) as rollouts,
        process_group(ranks),
    ):
        yield SharedEngine(base, rollouts, ranks, policy)
